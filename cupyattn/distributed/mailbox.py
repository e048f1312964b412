"""Ranks that are threads of one process: NumPy arrays are copied, CuPy arrays from GPU to GPU.

A sender posts its array; the receiver copies it and confirms. On GPUs the host waits only for the
other thread to arrive: the copy waits for the sender's stream by an event, and the sender's stream
waits for the copy. Copies go peer to peer where the driver can, otherwise through the host.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.distributed.failures import SharedFailures
from cupyattn.runtime.annotations import Stream
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error


@dataclass(eq=False)
class Parcel:
    """An array on its way."""

    array: Array
    ready: object
    """On a GPU the event after the work that fills the array."""
    copied: Any = None
    """On a GPU the event after the copy."""
    taken: bool = False


class PostOffice:
    """The state that ranks of one process share: parcels, and which rank waits for which."""

    def __init__(self, timeout: float) -> None:
        self.failures = SharedFailures()
        self._changed = self.failures.changed
        self._timeout = timeout
        self._boxes: dict[tuple[int, int], deque[Parcel]] = defaultdict(deque)
        self._waits_for: dict[int, tuple[int, Callable[[], bool]]] = {}
        """By rank: the rank that it waits for, and whether the wait is over."""

    def put(self, parcel: Parcel, rank: int, peer: int) -> None:
        """Post a parcel."""
        self.raise_failure()
        with self._changed:
            self._boxes[rank, peer].append(parcel)
            self._changed.notify_all()

    def take(self, rank: int, peer: int) -> Parcel:
        """Wait for the next parcel from a rank."""
        with self._changed:
            box = self._boxes[peer, rank]
        self._wait(lambda: bool(box), rank, peer)
        return box.popleft()

    def confirm(self, parcel: Parcel) -> None:
        """Confirm that a parcel is copied, or on a GPU that its copy is queued."""
        with self._changed:
            parcel.taken = True
            self._changed.notify_all()

    def wait_until_taken(self, parcel: Parcel, rank: int, peer: int) -> None:
        """Wait until a parcel's receiver has taken it."""
        self._wait(lambda: parcel.taken, rank, peer)

    def raise_failure(self) -> None:
        """Raise the error for a rank that has failed, if one has."""
        failure = self.failures.first()
        if failure is not None:
            raise failure

    def _wait(self, done: Callable[[], bool], rank: int, peer: int) -> None:
        with self._changed:
            self._waits_for[rank] = peer, done
            try:
                self.failures.wait(done, lambda: self._who_is_missing(peer), rank, self._timeout)
            finally:
                del self._waits_for[rank]

    def _who_is_missing(self, peer: int) -> int:
        """Follow the ranks that wait to one that does not; in a circle, return the first."""
        rank, seen = peer, set[int]()
        while rank in self._waits_for and rank not in seen:
            next_rank, done = self._waits_for[rank]
            if done():
                return rank
            seen.add(rank)
            rank = next_rank
        return peer if rank in seen else rank


class ThreadCommunicator:
    """The communicator of one thread."""

    gathers_on_host = True

    def __init__(self, office: PostOffice, rank: int, size: int, device: int | None = None) -> None:
        self._office = office
        self.rank, self.size = rank, size
        self.device = device
        self.failures = office.failures
        self._sent: list[tuple[Parcel, int, Any]] | None = None
        """The parcels that were sent inside `together`."""

    def send(self, array: Array, peer: int, stream: object) -> None:
        """Send an array to a rank."""
        parcel = Parcel(array, None if stream is None else _mark(stream))
        self._office.put(parcel, self.rank, peer)
        if self._sent is None:
            self._collect(parcel, peer, stream)
        else:
            self._sent.append((parcel, peer, stream))

    def receive(self, array: Array, peer: int, stream: Stream) -> None:
        """Receive into an array what a rank sends."""
        parcel = self._office.take(self.rank, peer)
        source = parcel.array
        if (source.shape, source.dtype) != (array.shape, array.dtype) or (
            isinstance(source, np.ndarray) != isinstance(array, np.ndarray)
        ):
            raise error(
                ValueError,
                f"rank {peer} sent {source.dtype} {source.shape}, rank {self.rank} expected "
                f"{array.dtype} {array.shape}",
                "ranks call with arrays of the same shapes and dtypes, in the same order",
                f"find where the calls of rank {peer} and rank {self.rank} differ",
            )
        if stream is None:
            array[...] = source
        else:
            stream.wait_event(parcel.ready)
            with stream:
                array.data.copy_from_device_async(source.data, source.nbytes, stream)
            parcel.copied = _mark(stream)
        self._office.confirm(parcel)

    def all_gather(self, array: Array, out: Array, stream: Stream) -> None:
        """Fill out with the array of each rank."""
        peers = [(self.rank + hop) % self.size for hop in range(1, self.size)]
        with self.together():
            for peer in peers:
                self.send(array, peer, stream)
            for peer in peers:
                self.receive(out[peer], peer, stream)
        if stream is None:
            out[self.rank] = array
        else:
            with stream:
                out[self.rank] = array

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send without waiting until it is received; wait at the end of the block."""
        self._sent = []
        try:
            yield
            sent, self._sent = self._sent, None
            for parcel, peer, stream in sent:
                self._collect(parcel, peer, stream)
        finally:
            self._sent = None

    def _collect(self, parcel: Parcel, peer: int, stream: Stream) -> None:
        """Make later work wait until a parcel is copied."""
        self._office.wait_until_taken(parcel, self.rank, peer)
        if stream is not None:
            stream.wait_event(parcel.copied)


def _mark(stream: object) -> object:
    event = load_cupy().cuda.Event(disable_timing=True)
    event.record(stream)
    return event
