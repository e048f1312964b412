"""Moves of a scheduler's blocks: within the pool, to host memory and back, in one order."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from cupyattn.kv_cache.pool import Copy, OutOfBlocksError
from cupyattn.kv_cache.requests import Run, SchedulerCache, has_whole
from cupyattn.kv_cache.sequence import Sequence


class Moves:
    """The copies that sequences call for: each is run after those that were called for before it.

    Parameters
    ----------
    cache : SchedulerCache
        Runs them.
    swaps : bool
        Whether blocks move to host memory to make room.
    """

    def __init__(self, cache: SchedulerCache, *, swaps: bool) -> None:
        self._cache = cache
        self._swaps = swaps
        self._waiting: list[Copy] = []
        # What a fault would leave undone: copies that an append has called for, a run's move.
        self._missing = False
        self._moving: Run | None = None
        self._dropped: list[Run] = []

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Let a sequence append; its copies are run before anything is written."""
        before, self._missing = self._missing, True
        try:
            copies = sequence.append(tokens)
        except OutOfBlocksError:
            self._missing = before
            raise
        self._waiting += copies
        self._missing = bool(self._waiting)

    def run(self) -> None:
        """Run the copies so far."""
        if self._waiting:
            self._cache.copy(tuple(self._waiting))
        self._missing = False
        self._waiting = []

    def undo(self, running: Items[Run], others: Items[Run]) -> None:
        """Cut what has no keys and values yet, and drop the copies that were not run.

        `running` are those that no forward should have freed, moved or cut.
        """
        self._stop_moving()
        for run in running:
            if run.sequence is not None and not has_whole(run.sequence, run.written):
                self._dropped.append(run)
        for run in (*running, *others):
            sequence = run.sequence
            if sequence is None or not has_whole(sequence, run.written):
                continue
            if len(sequence) == run.written:
                continue
            # One that has just begun may have found what another should have written.
            if self._missing or not run.written:
                self._dropped.append(run)
            sequence.truncate(run.written or sequence.num_cached_tokens)
        for run in self._dropped:  # after all are cut: nothing not written may stay cached
            run.drop()
        self._dropped, self._waiting = [], []
        self._missing = False

    def _stop_moving(self) -> None:
        """Let a run whose move was cut short be computed anew."""
        run = self._moving
        if run is None:
            return
        if run.runs:
            assert run.sequence is not None
            run.sequence.truncate(0)  # its blocks are found already, and may hold nothing
        run.drop()
        self._moving = None

    def swap_out(self, run: Run) -> None:
        """Take the blocks of a run; what they hold moves to host memory, if that has room."""
        assert run.sequence is not None
        self._moving = run
        try:
            copies = run.sequence.swap_out() if self._swaps else None
        except OutOfBlocksError:  # host memory is full
            copies = None
        if copies is None:
            run.drop()
        else:
            self.run()
            self._cache.copy_to_host(copies)
        self._moving = None

    def swap_in(self, run: Run, tokens: Iterable[int]) -> None:
        """Give a run that was swapped out its blocks back, and append what it computes next."""
        assert run.sequence is not None
        self._moving = run
        try:
            copies = run.sequence.swap_in()
            self.run()
            self._cache.copy_from_host(copies)
            self.append(run.sequence, tokens)
        except OutOfBlocksError:
            self._stop_moving()
            raise
        self._moving = None
