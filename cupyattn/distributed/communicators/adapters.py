"""Communicators of other libraries, known by their methods: nothing here is imported for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from cupyattn.arrays import Array
from cupyattn.cupy_library import load_cupy
from cupyattn.distributed.communicators.nccl import NCCLCommunicator, load_nccl
from cupyattn.distributed.communicators.protocol import Communicator
from cupyattn.errors import error
from cupyattn.fork import no_fork

_TAG = 17
_OWN = ("rank", "size", "send", "receive", "all_gather")


def communicator_of(given: Any) -> Communicator:
    """Return something that carries bytes as a `Communicator`.

    Raises
    ------
    TypeError
        For what is none.
    """
    if _has(given, *_OWN):
        return given
    if _has(given, "rank_id", "allGather", "recv"):
        return NCCLCommunicator(given)
    if _has(given, "send_recv", "recv", "all_gather"):
        return CupyxCommunicator(given)
    if _has(given, "nranks", "allgather", "recv"):
        return NCCL4PyCommunicator(given)
    if _has(given, "Get_rank", "Isend", "Irecv", "Allgather"):
        return MPICommunicator(given)
    raise error(
        TypeError,
        f"a communicator that is a {type(given).__module__}.{type(given).__qualname__}",
        f"it has {', '.join(_OWN)}, or is one of cupy.cuda.nccl, cupyx.distributed, nccl4py or "
        "mpi4py",
        "see cupyattn.distributed.Communicator for what a communicator of your own has",
    )


def _has(given: Any, *names: str) -> bool:
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


class CupyxCommunicator:
    """An NCCLBackend of cupyx.distributed, whose store the user stops."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._nccl = load_nccl()
        self.rank, self.size = int(backend.rank), int(backend._n_devices)

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
    through memory of the host, for MPI libraries that do not take them are many.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank, self.size = int(communicator.Get_rank()), int(communicator.Get_size())
        self._pending: list[tuple[Any, Any]] | None = None
        """Inside of `together`: requests, and what is to be done behind each."""

    def send(self, array: Array, peer: int, stream: Any) -> None:
        """Send an array to a rank."""
        on_host = _bytes(_to_host(array, stream))
        self._start(self._communicator.Isend(on_host, dest=peer, tag=_TAG), lambda: on_host)

    def receive(self, array: Array, peer: int, stream: Any) -> None:
        """Receive into an array what a rank sends."""
        on_host = array if stream is None else np.empty(array.shape, array.dtype)
        request = self._communicator.Irecv(_bytes(on_host), source=peer, tag=_TAG)
        self._start(request, lambda: None if stream is None else array.set(on_host, stream))

    def all_gather(self, array: Array, out: Array, stream: Any) -> None:
        """Fill out with the array of each rank."""
        on_host = out if stream is None else np.empty(out.shape, out.dtype)
        self._communicator.Allgather(_bytes(_to_host(array, stream)), _bytes(on_host))
        if stream is not None:
            out.set(on_host, stream)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Start all inside, and wait behind the block."""
        self._pending = []
        try:
            yield
            pending, self._pending = self._pending, None
            for request, then in pending:
                request.Wait()
                then()
        finally:
            self._pending = None

    def _start(self, request: Any, then: Any) -> None:
        if self._pending is None:
            request.Wait()
            then()
        else:
            self._pending.append((request, then))


def _to_host(array: Array, stream: Any) -> Any:
    if stream is None:
        return array
    on_host = load_cupy().asnumpy(array, stream=stream)
    stream.synchronize()
    return on_host


def _bytes(array: Array) -> Array:
    """View a contiguous array as its bytes: some libraries know no bfloat16."""
    return array.reshape(-1).view("uint8")
