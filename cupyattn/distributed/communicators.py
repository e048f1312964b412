"""Communicators of other libraries or of the user, and the carrier that moves bytes through one.

Communicators are recognised by their methods, without imports. A communicator has three methods;
adapters give them to NCCL, MPI and threads. The carrier calls them, at once or rank by rank, on the
caller's thread or on another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from cupyattn.distributed.mailbox import ThreadCommunicator
from cupyattn.distributed.nccl import NCCLCommunicator, aside, load_nccl
from cupyattn.runtime.annotations import Stream
from cupyattn.runtime.arrays import Array, CudaArray
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork


class Communicator(Protocol):
    """One rank's side of a communicator; any object with these members is one.

    `stream` is the CuPy stream that a method joins: work that was enqueued before is done first,
    work that is enqueued later may use the result. For NumPy arrays it is None, and a method
    returns when it is done. Arrays are contiguous in C order; only their bytes are transferred.
    Methods are called one after another on a separate thread, so that a group's timeout also ends
    a method that never returns.

    Optional members:

    - ``together()``, a context manager: everything that is sent and received inside goes at once,
      in both directions, as between ncclGroupStart and ncclGroupEnd. Without it ranks alternate
      between sending and receiving, which takes twice as long.
    - ``device``, the CUDA ordinal that arrays have to be on.
    - ``abort()``, which ends calls that wait for another rank.
    - ``failures``, where threads or processes post that one has failed.
    - ``gathers_on_host``, whether all_gather takes NumPy arrays too where ranks have a GPU each.
      Then ranks compare every call without the GPU, not only the first of its kind.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def send(self, array: Array, peer: int, stream: object) -> None:
        """Send an array to a rank."""

    def receive(self, array: Array, peer: int, stream: object) -> None:
        """Receive into an array what a rank sends."""

    def all_gather(self, array: Array, out: Array, stream: object) -> None:
        """Fill out (size, ...) with the array (...) of each rank, in the order of ranks."""


_TAG = 17
_SECONDS_BETWEEN_LOOKS = 0.02
# A message that is about to come is taken at once; otherwise the core is left to others. MPI moves
# the parts of a long message when it is tested, so sleeps are short (64 MiB between two processes,
# MPICH 5.0: 10.1 GB/s, and 10.3 by its own Sendrecv; 2026-11-24).
_SECONDS_AWAKE, _SECONDS_ASLEEP = 1e-3, 1e-4
_ABANDONED: list[Any] = []
"""Abandoned requests of MPI: they keep the arrays alive that MPI may still write to."""
_OWN = ("rank", "size", "send", "receive", "all_gather")


def communicator_of(given: Any, look: Callable[[], None] = lambda: None) -> Communicator:
    """Return a `Communicator` for one of another library, or of the user.

    `look` is called while MPI waits, and raises to end the wait.

    Raises TypeError for other objects, or a rank or size that is not an integer.
    """
    if _has(given, *_OWN):
        if not all(hasattr(number, "__index__") for number in (given.rank, given.size)):
            raise error(
                TypeError,
                f"a communicator of rank {shown(given.rank)} and size {shown(given.size)}",
                "both are integers",
                "check rank and size of your communicator",
            )
        return given
    if _has(given, "rank_id", "allGather", "recv"):
        return NCCLCommunicator(given)
    if _has(given, "send_recv", "recv", "all_gather"):
        return CupyxCommunicator(given)
    if _has(given, "nranks", "allgather", "recv"):
        return NCCL4PyCommunicator(given)
    if _has(given, "Get_rank", "Isend", "Irecv", "Iallgather", "Idup"):
        return MPICommunicator(given, look)
    raise error(
        TypeError,
        f"a communicator of type {type(given).__module__}.{type(given).__qualname__}",
        f"it has {', '.join(_OWN)}, or is one of cupy.cuda.nccl, cupyx.distributed, nccl4py or "
        "mpi4py",
        "see cupyattn.distributed.Communicator for what a communicator of your own has",
    )


def may_keep_the_host(communicator: Communicator) -> bool:
    """Return whether a communicator is the user's, whose methods may block for ever."""
    known = (
        ThreadCommunicator, NCCLCommunicator, CupyxCommunicator, NCCL4PyCommunicator,
        MPICommunicator,
    )  # fmt: skip
    return not isinstance(communicator, known)


def _has(given: object, *names: str) -> bool:
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


class CupyxCommunicator:
    """An NCCLBackend of cupyx.distributed, whose store the user stops."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._nccl = load_nccl()
        self.rank, self.size = int(backend.rank), int(backend._n_devices)
        self.device = int(backend._comm.device_id())

    def send(self, array: Array, peer: int, stream: Stream) -> None:
        """Send an array to a rank."""
        self._backend.send(_bytes(array), peer, stream)

    def receive(self, array: Array, peer: int, stream: Stream) -> None:
        """Receive into an array what a rank sends."""
        self._backend.recv(_bytes(array), peer, stream)

    def all_gather(self, array: Array, out: Array, stream: Stream) -> None:
        """Fill out with the array of each rank."""
        self._backend.all_gather(_bytes(array), _bytes(out), array.nbytes, stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Group all operations inside into one; the backend's send_recv has one peer for both."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def abort(self) -> None:
        """End calls that wait for another rank; the backend itself cannot."""
        self._backend._comm.abort()


class NCCL4PyCommunicator:
    """A Communicator of nccl4py."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        with no_fork():
            self._together = import_module("nccl.core").group
        self.rank, self.size = int(communicator.rank), int(communicator.nranks)
        self.device = int(communicator.device.device_id)

    def send(self, array: Array, peer: int, stream: Stream) -> None:
        """Send an array to a rank."""
        self._communicator.send(_bytes(array), peer, stream=stream.ptr)

    def receive(self, array: Array, peer: int, stream: Stream) -> None:
        """Receive into an array what a rank sends."""
        self._communicator.recv(_bytes(array), peer, stream=stream.ptr)

    def all_gather(self, array: Array, out: Array, stream: Stream) -> None:
        """Fill out with the array of each rank."""
        self._communicator.allgather(_bytes(array), _bytes(out), stream=stream.ptr)

    def together(self) -> Any:
        """Group all operations inside into one."""
        return self._together()

    def abort(self) -> None:
        """End calls that wait for another rank."""
        self._communicator.abort()


class MPICommunicator:
    """A communicator of mpi4py, or one with its methods.

    MPI has no streams: the host waits for the stream, then for the message. Arrays of a GPU go
    through host memory, because many MPI libraries do not take them. A loop waits instead of MPI,
    so that the wait can be ended.
    """

    gathers_on_host = True

    def __init__(self, communicator: Any, look: Callable[[], None]) -> None:
        self._given = communicator
        self._look = look
        self._own: Any = None
        """A duplicate with separate messages, made with the first one."""
        self._failed = False
        self.rank, self.size = int(communicator.Get_rank()), int(communicator.Get_size())
        self._pending: list[tuple[object, object]] | None = None
        """Inside `together`: requests, and the work to do after each."""

    def send(self, array: Array, peer: int, stream: object) -> None:
        """Send an array to a rank."""
        on_host = _bytes(_to_host(array, stream))
        self._start(self._communicator.Isend(on_host, dest=peer, tag=_TAG), lambda: None)

    def receive(self, array: Array, peer: int, stream: object) -> None:
        """Receive into an array what a rank sends."""
        on_host: Any = array if stream is None else np.empty(array.shape, array.dtype)
        request = self._communicator.Irecv(_bytes(on_host), source=peer, tag=_TAG)
        target = cast("CudaArray", array)
        self._start(request, lambda: None if stream is None else target.set(on_host, stream))

    def all_gather(self, array: Array, out: Array, stream: object) -> None:
        """Fill out with the array of each rank."""
        on_host: Any = out if stream is None else np.empty(out.shape, out.dtype)
        sent = _bytes(_to_host(array, stream))
        self._wait([self._communicator.Iallgather(sent, _bytes(on_host))])
        if stream is not None:
            cast("CudaArray", out).set(on_host, stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all operations inside, and wait at the end of the block."""
        pending: list[tuple[Any, Any]] = []
        self._pending = pending
        try:
            yield
        except BaseException:
            _ABANDONED.extend(request for request, _ in pending)
            raise
        finally:
            self._pending = None
        self._wait([request for request, _ in pending])
        for _, then in pending:
            then()

    def abort(self) -> None:
        """Remember that not all ranks will close, which freeing a communicator needs."""
        self._failed = True

    def close(self) -> None:
        """Free the duplicate."""
        if self._own is not None and not self._failed:
            self._own.Free()

    @property
    def _communicator(self) -> Any:
        if self._own is None:
            self._own, request = self._given.Idup()
            self._wait([request])
        return self._own

    def _start(self, request: Any, then: Any) -> None:
        if self._pending is None:
            self._wait([request])
            then()
        else:
            self._pending.append((request, then))

    def _wait(self, requests: list[Any]) -> None:
        begun = looked = time.monotonic()
        try:
            while requests := [request for request in requests if not request.Test()]:
                now = time.monotonic()
                if now - looked > _SECONDS_BETWEEN_LOOKS:
                    self._look()
                    looked = now
                time.sleep(0.0 if now - begun < _SECONDS_AWAKE else _SECONDS_ASLEEP)
        except BaseException:
            _ABANDONED.extend(requests)
            raise


def _to_host(array: Array, stream: Stream) -> Any:
    if stream is None:
        return array
    on_host = load_cupy().asnumpy(array, stream=stream)
    stream.synchronize()
    return on_host


def _bytes(array: Array) -> Array:
    """View a contiguous array as its bytes: some libraries know no bfloat16."""
    return array.reshape(-1).view("uint8")


class Carrier:
    """One rank's transfers to the others; `look` raises to end a wait."""

    def __init__(self, communicator: Communicator, look: Callable[[], None]) -> None:
        self._communicator = communicator
        self._look = look

    def require_here(self, array: object, *, or_on_host: bool = False) -> None:
        """Raise unless an array is where the communicator can reach it.

        Raises TypeError unless it is an array of NumPy or CuPy; ValueError if it is not on the
        communicator's device, if that has one.
        """
        communicator, device = self._communicator, None
        if not isinstance(array, np.ndarray):
            device = getattr(getattr(array, "device", None), "id", None)
            if device is None:
                raise error(
                    TypeError,
                    f"{type(array).__name__} where an array belongs",
                    "arrays of NumPy and CuPy have bytes to send",
                    "pass numpy.asarray of it, or cupy.asarray",
                )
        elif or_on_host:
            return
        allowed = getattr(communicator, "device", None)
        if allowed is not None and device != allowed:
            where = "NumPy's" if device is None else f"on device {device}"
            raise error(
                ValueError,
                f"an array that is {where}, of rank {communicator.rank} on device {allowed}",
                "a rank's arrays are on the device of its communicator",
                f"make it inside 'with cupy.cuda.Device({allowed})'",
            )

    def exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: object,
    ) -> None:
        """Send arrays to one rank and receive others from another, at the distance of all ranks."""
        self._carry(lambda: self._exchange(outgoing, to, incoming, source, stream), stream)

    def all_gather(self, array: Array, out: Array, stream: object) -> None:
        """Fill out with the array of each rank."""
        self._carry(lambda: self._communicator.all_gather(array, out, stream), stream)

    def _exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: object,
    ) -> None:
        communicator = self._communicator
        together = getattr(communicator, "together", None)
        if together is not None:
            with together():
                for array in outgoing:
                    communicator.send(array, to, stream)
                for array in incoming:
                    communicator.receive(array, source, stream)
            return
        rank, size = communicator.rank, communicator.size
        hop = min((to - rank) % size, (rank - to) % size)
        halves = [(communicator.send, outgoing, to), (communicator.receive, incoming, source)]
        # Every circle of senders has neighbours that differ in this order, so one receives.
        for act, arrays, peer in halves if rank // hop % 2 == 0 else halves[::-1]:
            for array in arrays:
                act(array, peer, stream)

    def _carry(self, move: Callable[[], None], stream: Stream) -> None:
        if not may_keep_the_host(self._communicator):
            move()
            return
        if stream is None:
            aside(move, self._look)
            return
        device = load_cupy().cuda.Device()

        def there() -> None:
            with device, stream:
                move()

        aside(there, self._look)
