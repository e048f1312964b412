"""Which accesses to shared memory barriers order: vector clocks.

As in FastTrack (C. Flanagan, S. Freund, "FastTrack: efficient and precise dynamic race detection",
2009). A clock belongs to a *unit*: a warp, in which lanes are known apart, or, in a kernel with a
``bar.warp.sync`` of some lanes of a warp, which orders those alone, a lane. Every unit counts
epochs, one for each barrier it passes, and `seen[block, w, v]` is the last epoch of unit v that a
barrier has made visible to unit w. What unit v did in epoch e is ordered before what unit w does
now if e <= seen[block, w, v].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.machine.lanes import Lanes

__all__ = ["Clocks"]

Array = Any


class Clocks:
    """The epochs of a batch.

    Attributes
    ----------
    unit : int
        Lanes that share a clock: 32 or 1.
    units : int
        Clocks of a block.
    epoch : (blocks, units) int32 array
        Another array after each barrier: who keeps one keeps a moment.
    seen : (blocks, units, units) int32 array
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.unit = 1 if lanes.program.partial_warp_barriers else 32
        self.units = units = lanes.threads // self.unit
        self.epoch = np.ones((lanes.blocks, units), np.int32)
        self.seen = np.zeros((lanes.blocks, units, units), np.int32)
        self._pending: dict[tuple[int, int], np.ndarray] = {}  # by block and barrier

    def _join(self, block: int, units: np.ndarray, extra: np.ndarray | None = None) -> None:
        """Let units meet; `epoch` is a new array already."""
        seen, epoch = self.seen[block], self.epoch[block]
        known = seen[units].max(0)
        if extra is not None:
            known = np.maximum(known, extra)
        known[units] = epoch[units]
        seen[units] = known
        epoch[units] += 1

    def _identifiers(self, lanes: np.ndarray, identifier: np.ndarray) -> np.ndarray:
        """Return per block and unit the barrier at which some of its lanes are, -1 if none."""
        ids: np.ndarray = np.where(lanes, identifier, -1)
        return ids.reshape(self.lanes.blocks, self.units, self.unit).max(2)

    def sync_blocks(self, rows: np.ndarray | slice) -> None:
        """Let all threads of some blocks pass a barrier."""
        self.seen[rows] = self.epoch[rows][:, None, :]
        self.epoch = self.epoch.copy()
        self.epoch[rows] += 1

    def sync_groups(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` pass the barriers whose ids `identifier` holds per lane."""
        ids = self._identifiers(lanes, identifier)
        self.epoch = self.epoch.copy()
        for block in np.flatnonzero((ids >= 0).any(1)):
            for number in np.unique(ids[block]):
                if number >= 0:
                    units = np.flatnonzero(ids[block] == number)
                    before = self._pending.pop((int(block), int(number)), None)
                    self._join(int(block), units, before)

    def forget_arrivals(self, barriers: np.ndarray) -> None:
        """Drop what was announced at the marked (block, barrier)s: they opened for nobody."""
        for block, number in np.argwhere(barriers):
            self._pending.pop((int(block), int(number)), None)

    def arrive(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` announce what they have done, without waiting."""
        ids = self._identifiers(lanes, identifier)
        self.epoch = self.epoch.copy()
        for block, unit in np.argwhere(ids >= 0):
            known = self.seen[block, unit].copy()
            known[unit] = self.epoch[block, unit]
            key = (int(block), int(ids[block, unit]))
            before = self._pending.get(key)
            self._pending[key] = known if before is None else np.maximum(before, known)
            self.seen[block, unit, unit] = self.epoch[block, unit]
            self.epoch[block, unit] += 1

    def sync_warps(self, mask: np.ndarray | None, named: Array) -> None:
        """Let the lanes of `mask` (None: all) meet those that they name (``bar.warp.sync``)."""
        shape, warps = self.lanes.shape, (self.lanes.blocks, self.lanes.warps)
        self.epoch = self.epoch.copy()
        if self.unit == 1:
            here = np.ones(shape, bool) if mask is None else mask
            members = np.broadcast_to(named, shape)
            for block, warp in np.argwhere(here.reshape(*warps, 32).any(2)):
                lanes = 32 * warp + np.flatnonzero(here[block, 32 * warp : 32 * warp + 32])
                for group in np.unique(members[block, lanes]):  # equal masks meet
                    self._join(int(block), lanes[members[block, lanes] == group])
            return
        busy: Any = np.ones(warps, bool)
        if mask is not None:
            busy = mask.reshape(*warps, 32).any(2)
        block, warp = np.nonzero(busy)
        self.seen[block, warp, warp] = self.epoch[block, warp]
        self.epoch[block, warp] += 1
