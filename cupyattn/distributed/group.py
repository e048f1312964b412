"""A group of ranks: what carries their bytes, which device is theirs, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed.communicators.adapters import communicator_of
from cupyattn.distributed.failures import Failures, SharedFailures
from cupyattn.distributed.watch import Watch
from cupyattn.errors import error, shown

TIMEOUT = 300.0


class Group:
    """One rank's place among several.

    Parameters
    ----------
    communicator : object
        What carries the bytes: a `Communicator` of your own with three methods, or one of
        cupy.cuda.nccl, cupyx.distributed, nccl4py or mpi4py. `run` and `nccl_group` make groups
        without any of these.
    size : int, optional
        How many ranks there have to be, where you know.
    timeout : float
        Seconds that a transfer may take once it is its turn. Then the communicator is aborted (if
        it can be), and the next call of this group raises `RankFailedError`.

    Raises
    ------
    TypeError
        For what is no communicator.
    ValueError
        For a communicator of another size, or a timeout that is no positive number.

    Notes
    -----
    Whatever a transfer raises ends the group: its later calls raise `RankFailedError`.

    As a context manager it tells the other ranks of an exception that leaves the block, where there
    is a way (`run`, `nccl_group`), and raises for another rank's failure at the end.

    The NCCLBackend of cupyx.distributed stays yours to end: unless rank 0 calls its ``stop()``, the
    process of its store keeps the program from ending.
    """

    def __init__(
        self, communicator: Any, *, size: int | None = None, timeout: float = TIMEOUT
    ) -> None:
        self._communicator = communicator_of(communicator)
        self.rank = int(self._communicator.rank)
        self.size = int(self._communicator.size)
        if not (isinstance(timeout, int | float) and timeout > 0):
            raise error(
                ValueError,
                f"timeout = {shown(timeout)}",
                "it is a number of seconds above 0",
                "leave it out for 300",
            )
        if (size is not None and size != self.size) or not 0 <= self.rank < self.size:
            raise error(
                ValueError,
                f"a communicator of {self.size} ranks, this one rank {self.rank}"
                + ("" if size is None else f", for {shown(size)} ranks"),
                "its ranks count from 0, and are as many as size says",
                "make a communicator of the ranks that take part",
            )
        self.device: int | None = getattr(self._communicator, "device", None)
        self._failures: Failures = getattr(self._communicator, "failures", None) or SharedFailures()
        self.transport = type(self._communicator).__name__
        self._watch = Watch(self.rank, timeout, self._failures, self._abort)
        self._aborting = threading.Lock()
        self._aborted = False
        self.agreed: set[tuple[str, ...]] = set()
        """What all ranks have said of their calls, where they are asked once."""
        self._streams: dict[int, Any] = {}

    def exchange(
        self,
        outgoing: Sequence[Array],
        to: int,
        incoming: Sequence[Array],
        source: int,
        stream: Any = None,
    ) -> None:
        """Send arrays to one rank, and receive as many from another.

        Parameters
        ----------
        outgoing, incoming : sequences of arrays
            Contiguous; `incoming` are written.
        to, source : int
            Ranks; each rank sends as far as every other one, ``to - rank`` modulo size.
        stream : cupy.cuda.Stream, optional
            Whose order this joins; None for NumPy arrays.

        Raises
        ------
        RankFailedError
                If a rank has failed, or did not come in time.
        """
        communicator = self._communicator
        together = getattr(communicator, "together", None)
        waits_for = f"rank {source} to send and rank {to} to receive"
        with self._transfer(stream, source, waits_for):
            if together is not None:
                with together():
                    for array in outgoing:
                        communicator.send(array, to, stream)
                    for array in incoming:
                        communicator.receive(array, source, stream)
                return
            hop = min((to - self.rank) % self.size, (self.rank - to) % self.size)
            turns = [(communicator.send, outgoing, to), (communicator.receive, incoming, source)]
            # Every circle of senders has neighbours that differ in this, so someone receives.
            for act, arrays, peer in turns if self.rank // hop % 2 == 0 else turns[::-1]:
                for array in arrays:
                    act(array, peer, stream)

    def all_gather(self, array: Array, /) -> list[Array]:
        """Gather an array of each rank, in the order of ranks.

        Parameters
        ----------
        array : array
            Of one shape and dtype on all ranks.

        Returns
        -------
        list of arrays
            Those of all ranks, this one's too, on the device of the array given.

        Raises
        ------
        RankFailedError
            If a rank has failed, or did not come in time.
        """
        on_host = isinstance(array, np.ndarray)
        xp = np if on_host else load_cupy()
        with self.on_device(None if on_host else array.device.id):
            stream = None if on_host else xp.cuda.get_current_stream()
            out = xp.empty((self.size, array.size), array.dtype)
            peer = (self.rank + 1) % self.size
            others = " or another" if self.size > 2 else ""
            flat = xp.ascontiguousarray(array).reshape(-1)
            with self._transfer(stream, peer, f"rank {peer}{others}"):
                self._communicator.all_gather(flat, out, stream)
        return [row.reshape(array.shape) for row in out]

    @contextmanager
    def _transfer(self, stream: Any, peer: int, waits_for: str) -> Iterator[None]:
        """Watch what is inside; what it raises ends the group: nobody knows what is still to come.

        Otherwise a later call would take the bytes of this one for its own.
        """
        self.check()
        try:
            with self._watch.over(stream, peer, waits_for):
                yield
        except BaseException as raised:
            self.fail(raised)
            raise

    def side_stream(self, device: int) -> Any:
        """Return the stream that transfers of a device take, above others in priority."""
        if device not in self._streams:
            cupy = load_cupy()
            with cupy.cuda.Device(device):
                self._streams[device] = cupy.cuda.Stream(non_blocking=True, priority=-1)
        return self._streams[device]

    def check(self) -> None:
        """Raise RankFailedError if a rank is known to have failed."""
        failure = self._failures.first()
        if failure is not None:
            raise failure

    def fail(self, reason: BaseException | str) -> None:
        """Tell the other ranks, where there is a way, that this one has failed."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        self._failures.post(self.rank, f"rank {self.rank} failed: {text}")
        self._abort()

    def close(self) -> None:
        """Leave the group, and give back what it holds."""
        self._watch.stop()
        self._failures.leave(self.rank)
        if (close := getattr(self._communicator, "close", None)) is not None:
            close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if raised is None:
            self._watch.drain()
            try:
                self.check()
            finally:
                self.close()
            return
        if self._failures.first() is None:
            self.fail(raised)
        self._abort()
        self._watch.stop()

    def _abort(self) -> None:
        abort = getattr(self._communicator, "abort", None)
        with self._aborting:
            if abort is not None and not self._aborted:
                self._aborted = True
                abort()

    def on_device(self, device: int | None) -> AbstractContextManager[Any]:
        """Make a device the current one, if it is a GPU."""
        return nullcontext() if device is None else load_cupy().cuda.Device(device)
