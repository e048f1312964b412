"""Communicators without a GPU: one that a user wrote, and one with the methods of mpi4py."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np


class Wires:
    """A queue from each rank to each: a send waits until it is received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)
        self._taken: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)

    def of(self, table: Any, key: Any) -> queue.Queue[Any]:
        with self._lock:
            return table[key]

    def send(self, data: Any, rank: int, peer: int, *, wait: bool) -> Any:
        self.of(self._queues, (rank, peer)).put(np.array(data))
        taken = self.of(self._taken, (rank, peer))
        return taken.get(timeout=20) if wait else lambda: taken.get(timeout=20)

    def has(self, rank: int, peer: int) -> bool:
        return not self.of(self._queues, (peer, rank)).empty()

    def receive(self, rank: int, peer: int) -> Any:
        data = self.of(self._queues, (peer, rank)).get(timeout=20)
        self.of(self._taken, (peer, rank)).put(True)
        return data


class Own:
    """A user's communicator: three methods, each of which waits."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self._wires, self.rank, self.size = wires, rank, size

    def send(self, array: Any, peer: int, stream: Any) -> None:
        assert stream is None
        self._wires.send(array, self.rank, peer, wait=True)

    def receive(self, array: Any, peer: int, stream: Any) -> None:
        array[...] = self._wires.receive(self.rank, peer)

    def all_gather(self, array: Any, out: Any, stream: Any) -> None:
        out[self.rank] = array
        others = [peer for peer in range(self.size) if peer != self.rank]
        pending = [self._wires.send(array, self.rank, peer, wait=False) for peer in others]
        for peer in others:
            out[peer] = self._wires.receive(self.rank, peer)
        for wait in pending:
            wait()


class Request:
    """Done as soon as `act` says so."""

    def __init__(self, act: Any) -> None:
        self._act, self._done = act, False

    def Test(self) -> bool:  # noqa: N802
        self._done = self._done or self._act()
        return self._done


class MPI:
    """The methods of mpi4py that a ring uses."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self._own = Own(wires, rank, size)
        self._wires = wires
        self._posted: defaultdict[int, deque[tuple[Any, list[bool]]]] = defaultdict(deque)

    def Get_rank(self) -> int:  # noqa: N802
        return self._own.rank

    def Get_size(self) -> int:  # noqa: N802
        return self._own.size

    def Idup(self) -> tuple[MPI, Request]:  # noqa: N802
        return MPI(self._wires, self._own.rank, self._own.size), Request(lambda: True)

    def Free(self) -> None:  # noqa: N802
        pass

    def Isend(self, buffer: Any, dest: int, tag: int) -> Request:  # noqa: N802
        self._wires.send(buffer, self._own.rank, dest, wait=False)
        return Request(lambda: True)  # the message is buffered

    def Irecv(self, buffer: Any, source: int, tag: int) -> Request:  # noqa: N802
        posted, done = self._posted[source], [False]
        posted.append((buffer, done))

        def act() -> bool:
            # Messages of a source go to receives in the order in which these were posted, whichever
            # of them is tested first.
            while posted and self._wires.has(self._own.rank, source):
                first, first_done = posted.popleft()
                first[...] = self._wires.receive(self._own.rank, source)
                first_done[0] = True
            return done[0]

        return Request(act)

    def Iallgather(self, buffer: Any, out: Any) -> Request:  # noqa: N802
        rank, size = self._own.rank, self._own.size
        parts = out.reshape(size, -1)
        parts[rank] = buffer
        others = [peer for peer in range(size) if peer != rank]
        for peer in others:
            self._wires.send(buffer, rank, peer, wait=False)
        pending = [self.Irecv(parts[peer], peer, 0) for peer in others]
        return Request(lambda: sum(request.Test() for request in pending) == size - 1)
