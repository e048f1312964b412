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

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Let a sequence append; its copies are run before anything is written."""
        self._waiting += sequence.append(tokens)

    def run(self) -> None:
        """Run the copies so far."""
        if self._waiting:
            self._cache.copy(tuple(self._waiting))
            self._waiting = []

    def undo(self, running: Items[Run], waiting: Items[Run]) -> None:
        """Cut what has no keys and values yet, and drop the copies that were not run."""
        lost = bool(self._waiting)  # a copy failed, or was not run
        self._waiting = []
        dropped = []
        for run in running:  # which a forward should not have freed, moved or cut
            if run.sequence is not None and not has_whole(run.sequence, run.written):
                dropped.append(run)
        for run in (*running, *waiting):
            sequence = run.sequence
            if sequence is None or not has_whole(sequence, run.written):
                continue
            if len(sequence) == run.written:
                continue
            sequence.truncate(run.written or sequence.num_cached_tokens)
            # One that has just begun may have found what another should have written.
            if lost or not run.written:
                dropped.append(run)
        for run in dropped:  # after all are cut: nothing that is not written may stay cached
            run.drop()

    def swap_out(self, run: Run) -> None:
        """Take the blocks of a run; what they hold moves to host memory, if that has room."""
        assert run.sequence is not None
        try:
            copies = run.sequence.swap_out() if self._swaps else None
        except OutOfBlocksError:  # host memory is full
            copies = None
        if copies is None:
            run.drop()
            return
        try:
            self.run()
            self._cache.copy_to_host(copies)
        except BaseException:
            run.drop()
            raise

    def swap_in(self, run: Run, tokens: Iterable[int]) -> None:
        """Give a run that was swapped out its blocks back, and append what it computes next."""
        sequence = run.sequence
        assert sequence is not None
        try:
            copies = sequence.swap_in()
            self.run()
            self._cache.copy_from_host(copies)
            self.append(sequence, tokens)
        except BaseException:
            if not sequence.is_swapped:
                sequence.truncate(0)  # its blocks are found already, and hold nothing
            run.drop()
            raise
