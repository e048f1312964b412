"""Communicators of other libraries, known by their methods: nothing here is imported for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from cupyattn.distributed.communicators.mailbox import ThreadCommunicator
from cupyattn.distributed.communicators.nccl import NCCLCommunicator, load_nccl
from cupyattn.distributed.communicators.protocol import Communicator
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.fork import no_fork

_TAG = 17
_SECONDS_BETWEEN_LOOKS = 0.02
# A message that is about to come is taken at once; one that is not leaves the core to others. MPI
# moves the parts of a long one when it is asked, so sleep is short (64 MiB between two processes,
# MPICH 5.0: 10.1 GB/s, and 10.3 by its own Sendrecv; 2026-11-24).
_SECONDS_AWAKE, _SECONDS_ASLEEP = 1e-3, 1e-4
_ABANDONED: list[Any] = []
"""Requests of MPI that nobody waits for any more: they hold the arrays that it may still touch."""
_OWN = ("rank", "size", "send", "receive", "all_gather")


def communicator_of(given: Any, look: Callable[[], None] = lambda: None) -> Communicator:
    """Return something that carries bytes as a `Communicator`.

    `look` is called while MPI waits, and raises to wait no more.

    Raises
    ------
    TypeError
        For what is none, or one whose rank or size is no integer.
    """
    if _has(given, *_OWN):
        if not all(hasattr(number, "__index__") for number in (given.rank, given.size)):
            raise error(
                TypeError,
                f"a communicator of rank {shown(given.rank)} and size {shown(given.size)}",
                "both are integers",
                "look what your communicator says of itself",
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
        f"a communicator that is a {type(given).__module__}.{type(given).__qualname__}",
        f"it has {', '.join(_OWN)}, or is one of cupy.cuda.nccl, cupyx.distributed, nccl4py or "
        "mpi4py",
        "see cupyattn.distributed.Communicator for what a communicator of your own has",
    )


def may_keep_the_host(communicator: Communicator) -> bool:
    """Tell whether nothing is known of how long a communicator waits: it is the user's own."""
    known = (
        ThreadCommunicator, NCCLCommunicator, CupyxCommunicator, NCCL4PyCommunicator,
        MPICommunicator,
    )  # fmt: skip
    return not isinstance(communicator, known)


def _has(given: Any, *names: str) -> bool:
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


class CupyxCommunicator:
    """An NCCLBackend of cupyx.distributed, whose store the user stops."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._nccl = load_nccl()
        self.rank, self.size = int(backend.rank), int(backend._n_devices)
        self.device = int(backend._comm.device_id())

    def send(self, array: Array, peer: int, stream: Any) -> None:
        """Send an array to a rank."""
        self._backend.send(_bytes(array), peer, stream)

    def receive(self, array: Array, peer: int, stream: Any) -> None:
        """Receive into an array what a rank sends."""
        self._backend.recv(_bytes(array), peer, stream)

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out with the array of each rank."""
        self._backend.all_gather(_bytes(array), _bytes(out), array.nbytes, stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one operation of all inside; the backend's send_recv has one peer for both."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def abort(self) -> None:
        """End what waits for another rank; the backend itself has no way to."""
        self._backend._comm.abort()


class NCCL4PyCommunicator:
    """A Communicator of nccl4py."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        with no_fork():
            self._together = import_module("nccl.core").group
        self.rank, self.size = int(communicator.rank), int(communicator.nranks)
        self.device = int(communicator.device.device_id)

    def send(self, array: Array, peer: int, stream: Any) -> None:
        """Send an array to a rank."""
        self._communicator.send(_bytes(array), peer, stream=stream.ptr)

    def receive(self, array: Array, peer: int, stream: Any) -> None:
        """Receive into an array what a rank sends."""
        self._communicator.recv(_bytes(array), peer, stream=stream.ptr)

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out with the array of each rank."""
        self._communicator.allgather(_bytes(array), _bytes(out), stream=stream.ptr)

    def together(self) -> Any:
        """Make one operation of all inside."""
        return self._together()

    def abort(self) -> None:
        """End what waits for another rank."""
        self._communicator.abort()


class MPICommunicator:
    """A communicator of mpi4py, or one with its methods.

    MPI knows no streams: the host waits for the stream, then for the message. Arrays of a GPU go
    through memory of the host, for MPI libraries that do not take them are many. What waits is not
    MPI but a loop, so that it can end before the message comes.
    """

    gathers_on_host = True

    def __init__(self, communicator: Any, look: Callable[[], None]) -> None:
        self._given = communicator
        self._look = look
        self._own: Any = None
        """A duplicate, whose messages are no other's; made with the first of them."""
        self._failed = False
        self.rank, self.size = int(communicator.Get_rank()), int(communicator.Get_size())
        self._pending: list[tuple[Any, Any]] | None = None
        """Inside of `together`: requests, and what is to be done behind each."""

    def send(self, array: Array, peer: int, stream: Any) -> None:
        """Send an array to a rank."""
        on_host = _bytes(_to_host(array, stream))
        self._start(self._communicator.Isend(on_host, dest=peer, tag=_TAG), lambda: None)

    def receive(self, array: Array, peer: int, stream: Any) -> None:
        """Receive into an array what a rank sends."""
        on_host = array if stream is None else np.empty(array.shape, array.dtype)
        request = self._communicator.Irecv(_bytes(on_host), source=peer, tag=_TAG)
        self._start(request, lambda: None if stream is None else array.set(on_host, stream))

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out with the array of each rank."""
        on_host = out if stream is None else np.empty(out.shape, out.dtype)
        sent = _bytes(_to_host(array, stream))
        self._wait([self._communicator.Iallgather(sent, _bytes(on_host))])
        if stream is not None:
            out.set(on_host, stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all inside, and wait behind the block."""
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
        """Take note that not all ranks are going to close, which freeing a communicator takes."""
        self._failed = True

    def close(self) -> None:
        """Give the duplicate back."""
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


def _to_host(array: Array, stream: Any) -> Any:
    if stream is None:
        return array
    on_host = load_cupy().asnumpy(array, stream=stream)
    stream.synchronize()
    return on_host


def _bytes(array: Array) -> Array:
    """View a contiguous array as its bytes: some libraries know no bfloat16."""
    return array.reshape(-1).view("uint8")
