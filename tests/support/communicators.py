"""Communicators without a GPU: a user's own, one with the methods of mpi4py, and pipes.

Pipes connect ranks that are processes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict, deque
from itertools import combinations
from multiprocessing import get_context
from typing import Any

import numpy as np
from support.ring import Case, ring

from cupyattn.distributed import Group


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


class Pipes:
    """Bytes go through pipes; there is no `together`, so ranks alternate to send and receive."""

    def __init__(self, rank: int, pipes: dict[int, Any]) -> None:
        self.rank, self.size = rank, len(pipes) + 1
        self._pipes = pipes

    def send(self, array: np.ndarray, peer: int, stream: Any) -> None:
        self._pipes[peer].send_bytes(array.tobytes())

    def receive(self, array: np.ndarray, peer: int, stream: Any) -> None:
        given = np.frombuffer(self._pipes[peer].recv_bytes(), array.dtype)
        array[...] = given.reshape(array.shape)

    def all_gather(self, array: np.ndarray, out: np.ndarray, stream: Any) -> None:
        out[self.rank] = array
        for sender in range(self.size):
            if sender == self.rank:
                for peer in self._pipes:
                    self.send(array, peer, stream)
            else:
                self.receive(out[sender], sender, stream)


def work(rank: int, pipes: dict[int, Any], results: Any, problem: Case, ends: bool) -> None:
    """Be one rank, twice; or die between both times."""
    with Group(Pipes(rank, pipes), size=problem.ranks) as group:
        for last in (False, True):
            if last and ends:
                os._exit(9)
            found = ring(problem, group)
    results.send(found)
    results.close()


def on_processes(problem: Case, *, ends: int | None = None) -> tuple[list[Any], list[int | None]]:
    """Run a process a rank, of which `ends` exits early; return what each sent, and exit codes."""
    context = get_context("spawn")
    pipes: list[dict[int, Any]] = [{} for _ in range(problem.ranks)]
    for one, other in combinations(range(problem.ranks), 2):
        pipes[one][other], pipes[other][one] = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(problem.ranks)]
    processes = [
        context.Process(
            target=work, args=(rank, pipes[rank], results[rank][1], problem, rank == ends)
        )
        for rank in range(problem.ranks)
    ]
    for process in processes:
        process.start()
    for rank in range(
        problem.ranks
    ):  # only the processes hold their ends: the death of one is noticed
        results[rank][1].close()
        for pipe in pipes[rank].values():
            pipe.close()
    found = []
    for reader, _ in results:
        try:
            found.append(reader.recv() if reader.poll(120) else None)
        except EOFError:
            found.append(None)
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
            process.join()
    return found, [process.exitcode for process in processes]
