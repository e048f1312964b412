"""NCCL through `cupy.cuda.nccl`, imported when it is needed: CuPy's wheel does not contain it.

An NCCL operation that has begun on one GPU of a process waits for the process's other ranks. While
it waits, threads of other ranks can neither allocate memory nor load a kernel. So all threads meet
before each operation (two H200, driver 13.0, 2026-11-23: without it the first backward never ends).
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from cupyattn.distributed.failures import Failures, FolderFailures, SharedFailures
from cupyattn.runtime.annotations import Stream
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error
from cupyattn.runtime.fork import no_fork

_SECONDS_BETWEEN_LOOKS = 0.02

_Result = TypeVar("_Result")


def aside(call: Callable[[], _Result], look: Callable[[], None]) -> _Result:
    """Make a call on a daemon thread and return its result; `look` raises to end the wait.

    The call then continues on its thread, which does not keep the program from ending.

    Examples
    --------
    >>> aside(lambda: 6 * 7, lambda: None)
    42
    """
    future: Future[_Result] = Future()

    def act() -> None:
        try:
            future.set_result(call())
        except BaseException as raised:  # the caller's, whatever it is
            future.set_exception(raised)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(act,), name="cupyattn-aside", daemon=True).start()
    while wait([future], _SECONDS_BETWEEN_LOOKS).not_done:
        look()
    return future.result()


class ThreadMeeting:
    """A barrier of the ranks of a process, at which each may pass a value to all.

    Examples
    --------
    >>> alone = ThreadMeeting(1, SharedFailures(), timeout=1.0)
    >>> alone(0, "a value of rank 0"), alone(0)
    (['a value of rank 0'], [None])
    """

    def __init__(self, size: int, failures: SharedFailures, timeout: float) -> None:
        self._came = [0] * size
        self._values: list[list[Any]] = [[None] * size, [None] * size]
        """Two lists alternate: one is overwritten only after all have reached the next barrier."""
        self._failures = failures
        self._timeout = timeout

    def __call__(self, rank: int, value: object = None) -> list[Any]:
        """Wait until all ranks have come as often as this one; return the value of each.

        Raises RankFailedError if a rank has failed, has left, or does not come in time.
        """
        with self._failures.changed:
            self._came[rank] += 1
            count = self._came[rank]
            self._values[count % 2][rank] = value
            self._failures.changed.notify_all()
        self._failures.wait(
            lambda: min(self._came) >= count,
            lambda: next(other for other, came in enumerate(self._came) if came < count),
            rank,
            self._timeout,
        )
        return list(self._values[count % 2])


ID_BYTES = 128
# NVLink multicast (NVLS) serves all-reduce. A ring sends and receives, and gains nothing by it; but
# a program that uses it can leave the GPUs of a shared host out of service. NCCL reads this once,
# when it makes its first communicator. A value that the user has set is kept.
_NO_MULTICAST = ("NCCL_NVLS_ENABLE", "0")


def load_nccl() -> Any:
    """Import CuPy's bindings of NCCL.

    Raises RuntimeError if NCCL is not installed.
    """
    load_cupy()
    os.environ.setdefault(*_NO_MULTICAST)
    with no_fork(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where NCCL is not; the error below says more
        nccl = import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise error(
            RuntimeError,
            "CuPy finds no NCCL",
            "it comes with the extra distributed, on Linux",
            "pip install 'cupyattn[distributed]'; in one process run(..., transport='peer') does "
            "without",
        )
    return nccl


def nccl_is_there() -> bool:
    """Return whether NCCL can be imported."""
    try:
        load_nccl()
    except (ImportError, RuntimeError):
        return False
    return True


class NCCLCommunicator:
    """A `cupy.cuda.nccl.NcclCommunicator`, which sends bytes whatever the dtype.

    Ranks that are threads of one process have a meeting, to which they come before each operation.
    There they gather NumPy arrays too, which NCCL does not.
    """

    def __init__(
        self,
        communicator: Any,
        failures: Failures | None = None,
        meeting: ThreadMeeting | None = None,
    ) -> None:
        self._nccl = load_nccl()
        self._meeting = meeting
        self._communicator = communicator
        self.failures = failures
        self.gathers_on_host = meeting is not None
        self.rank, self.size = int(communicator.rank_id()), int(communicator.size())
        self.device = int(communicator.device_id())

    def send(self, array: Array, peer: int, stream: Stream) -> None:
        """Send an array to a rank."""
        self._communicator.send(
            array.data.ptr, array.nbytes, self._nccl.NCCL_INT8, peer, stream.ptr
        )

    def receive(self, array: Array, peer: int, stream: Stream) -> None:
        """Receive into an array what a rank sends."""
        self._communicator.recv(
            array.data.ptr, array.nbytes, self._nccl.NCCL_INT8, peer, stream.ptr
        )

    def all_gather(self, array: Array, out: Array, stream: Stream) -> None:
        """Fill out with the array of each rank."""
        if stream is None and self._meeting is not None:
            out[...] = self._meeting(self.rank, array.copy())
            return
        self._meet()
        self._communicator.allGather(
            array.data.ptr, out.data.ptr, array.nbytes, self._nccl.NCCL_INT8, stream.ptr
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Group all operations inside into one."""
        self._meet()
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _meet(self) -> None:
        if self._meeting is not None:
            self._meeting(self.rank)

    def abort(self) -> None:
        """End calls that wait for another rank, on the GPU too."""
        self._communicator.abort()

    def close(self) -> None:
        """Free NCCL's resources."""
        self._communicator.destroy()


def of_id(
    rank: int, size: int, unique_id: bytes, failures: FolderFailures, timeout: float
) -> NCCLCommunicator:
    """Join, on the current device, the communicator of an id; waits until all ranks have.

    NCCL itself would wait for ever.

    Raises RankFailedError if a rank has failed before; TimeoutError if a rank does not come in
    time.
    """
    nccl, device = load_nccl(), load_cupy().cuda.Device()
    until = time.monotonic() + timeout

    def join() -> Any:
        with device:
            return nccl.NcclCommunicator(size, unique_id, rank)

    def look() -> None:
        failures.look()
        failure = failures.first()
        if failure is not None:
            raise failure
        if time.monotonic() > until:
            absent = ", ".join(map(str, failures.absent()))
            raise error(
                TimeoutError,
                f"rank {rank} waited {timeout:g} s for the other ranks to join NCCL's communicator"
                + (f"; in {failures.folder} there is no sign of rank {absent}" if absent else ""),
                f"all {size} ranks join it, with one id",
                "check that they run, or pass a longer timeout",
            )

    return NCCLCommunicator(aside(join, look), failures)


def new_id() -> bytes:
    """Return 128 new bytes that identify a communicator."""
    return bytes(load_nccl().get_unique_id())


def of_devices(
    devices: list[int], failures: SharedFailures, timeout: float
) -> list[NCCLCommunicator]:
    """Make one communicator for each of several devices of this process."""
    meeting = ThreadMeeting(len(devices), failures, timeout)
    ends = load_nccl().NcclCommunicator.initAll(devices)
    return [NCCLCommunicator(end, failures, meeting) for end in ends]
