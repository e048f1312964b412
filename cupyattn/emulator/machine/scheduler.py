"""Which lanes run which basic block next: branches, divergence and waiting.

While all lanes agree ("converged"), the current block is a Python int in the generated code and
nothing here is touched. Otherwise `pick` runs the lanes at the lowest position (`positions`).

Generated code carries two masks: `mask`, the lanes that run (None: all), and `merge`, which is the
same mask while lanes are diverged and None otherwise; only then must registers keep the values of
lanes that do not run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.machine.barriers import Barriers
from cupyattn.emulator.machine.positions import EXITED, WAITING, Positions, Step
from cupyattn.emulator.machine.warp_sync import WarpSync

__all__ = ["Scheduler"]

Array = Any


class Scheduler:
    """The scheduler of a batch's lanes: branches, barriers and warp synchronisation."""

    def __init__(self, positions: Positions, barriers: Barriers, warp_sync: WarpSync) -> None:
        self.positions = positions
        self.barriers = barriers
        self.warp_sync = warp_sync

    def start(self) -> Step:
        """Return the first step: block 0, all threads that exist."""
        return 0, self.positions.alive, None

    def branch(
        self, predicate: Array, target: int, otherwise: int, mask: Array, merge: Array
    ) -> Step:
        """Send the lanes with a true predicate to `target`, the others to `otherwise`."""
        if merge is not None:
            np.copyto(self.positions.each, np.where(predicate, target, otherwise), where=mask)
            return self.pick()
        if mask is None:
            taken = np.count_nonzero(predicate)
            if taken == predicate.size:
                return self.goto(target, None, None)
            if taken == 0:
                return self.goto(otherwise, None, None)
        else:
            if (predicate | ~mask).all():
                return self.goto(target, mask, None)
            if not (predicate & mask).any():
                return self.goto(otherwise, mask, None)
        self.positions.diverge(np.where(predicate, target, otherwise), mask)
        return self.pick()

    def branch_table(self, index: Array, table: Array, mask: Array, merge: Array) -> Step:
        """Send every lane to the block that `table` holds at its index (``brx.idx``)."""
        target = table.take(np.asarray(index).astype(np.int64), mode="clip")
        if merge is None:
            if target.ndim == 0:
                return int(target), mask, None
            self.positions.diverge(target, mask)
        else:
            np.copyto(self.positions.each, target, where=mask)
        return self.pick()

    def goto(self, target: int, mask: Array, merge: Array) -> Step:
        """Send the running lanes to `target`."""
        if merge is None:
            return (target, mask, None) if target != EXITED else (-1, None, None)
        self.positions.each[mask] = target
        return self.pick()

    def exit(self, mask: Array, merge: Array) -> Step:
        """End the running lanes."""
        if merge is None:
            return -1, None, None
        self.positions.each[mask] = EXITED
        return self.pick()

    def pick(self) -> Step:
        """Return the next step: the lowest block at which any lane stands."""
        each = self.positions.each
        number = int(each.min())
        while number == WAITING:
            if not (self.warp_sync.release() or self.barriers.release()):
                raise self.warp_sync.stuck(self.barriers.site_of) or self.barriers.stuck()
            number = int(each.min())
        return (-1, None, None) if number == EXITED else self.positions.step(number)
