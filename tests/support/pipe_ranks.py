"""Ranks that are processes and have a pipe to each other one: a communicator of a user's own.

With no GPU it is what NCCL is with one, for processes that a launcher has started.
"""

from __future__ import annotations

import os
from itertools import combinations
from multiprocessing import get_context
from typing import Any

import numpy as np
from support.ring import Case, ring

from cupyattn.distributed import Group


class Pipes:
    """Bytes go through pipes; there is no `together`, so ranks send and receive by turns."""

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
        for turn in range(self.size):  # each in its turn tells all others
            if turn == self.rank:
                for peer in self._pipes:
                    self.send(array, peer, stream)
            else:
                self.receive(out[turn], turn, stream)


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
    """What each rank sent, None where it ended before, and the exit codes; `ends` dies between."""
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
    for rank in range(problem.ranks):  # only the processes hold their ends: one that dies is heard
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
