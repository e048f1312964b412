"""Where threads of one process wait for one another before they start what needs all of them.

An operation of NCCL that has begun on one GPU of a process waits for its other ranks' part, and
while it waits a thread of another rank can neither allocate memory nor load a kernel: CUDA makes
that wait for the peers' GPUs. So no rank begins before all are about to (seen on two H200, driver
13.0, 2026-11-23: without it the ranks' first backward never ends).
"""

from __future__ import annotations

from typing import Any

from cupyattn.distributed.failures import SharedFailures


class Meeting:
    """A point that all ranks come to, again and again.

    Examples
    --------
    >>> alone = Meeting(1, SharedFailures(), timeout=1.0)
    >>> alone(0, "what rank 0 says"), alone(0)
    (['what rank 0 says'], [None])
    """

    def __init__(self, size: int, failures: SharedFailures, timeout: float) -> None:
        self._came = [0] * size
        self._said: list[list[Any]] = [[None] * size, [None] * size]
        """By turns: nobody overwrites one before all have come to the next."""
        self._failures = failures
        self._timeout = timeout

    def __call__(self, rank: int, says: Any = None) -> list[Any]:
        """Return when all ranks have come as often as this one, with what each says.

        Raises
        ------
        RankFailedError
            If a rank has failed, has left, or does not come in time.
        """
        with self._failures.changed:
            self._came[rank] += 1
            turn = self._came[rank]
            self._said[turn % 2][rank] = says
            self._failures.changed.notify_all()
        self._failures.wait(
            lambda: min(self._came) >= turn,
            lambda: next(other for other, came in enumerate(self._came) if came < turn),
            rank,
            self._timeout,
        )
        return list(self._said[turn % 2])
