"""Reads and writes of shared memory: by which threads, and in which epoch.

The unit is a granule, the smallest size that the kernel accesses shared memory with. Of every
granule the last write and the last read of each unit of threads (`clocks`) are recorded.

Most of these records would never be looked at: a barrier of the whole block orders all that came
before it. So accesses are logged first, and recorded (`settle`) only when one meets another since
the block's last such barrier: each marks the granules that it touches. At the barrier the block's
part of the log is forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.emulator.machine.clocks import Clocks
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.storage import ELEMENT

__all__ = ["COLLECTIVE", "MANY", "WHO", "Access", "History", "Marks", "Threads"]

Array = Any

# A record is epoch * 64 + who: a lane, several lanes, or the whole warp at once (ldmatrix).
MANY = 32
COLLECTIVE = 33
WHO = 63

_MOST_LOGGED = 512  # accesses, the indices of each of which stay in memory


class Threads(NamedTuple):
    """Who accesses what, an item an access."""

    lane: np.ndarray
    """Counted over the batch."""
    unit: np.ndarray
    """The unit that has a clock, counted over the batch."""
    own: np.ndarray
    """The unit, counted in its block."""
    who: np.ndarray
    """The lane, counted in its unit."""

    def chosen(self, these: np.ndarray) -> Threads:
        """Return those of a mask."""
        return Threads(*(each[these] for each in self))


class Access(NamedTuple):
    """An access as it happened, in elements of `per` granules."""

    index: Array
    per: int
    mask: Array
    lanes: np.ndarray | None
    """The lanes of the rows that whole warps load; None where the mask tells which lanes access."""
    epoch: np.ndarray
    is_write: bool
    atomic: bool


class Marks:
    """A mark a granule, which accesses of several see as one element."""

    def __init__(self, count: int, granule: int) -> None:
        self.bytes = np.zeros(count, np.uint8)
        self.used = False
        sizes = [per for per in ELEMENT if per * granule <= 16]
        self._elements = {per: self.bytes.view(ELEMENT[per]) for per in sizes}
        self._marked = {per: np.ones(per, np.uint8).view(ELEMENT[per])[0] for per in sizes}

    def set(self, access: Access) -> None:
        """Mark all that an access touches."""
        self.used = True
        self._elements[access.per][access.index] = self._marked[access.per]

    def any(self, access: Access) -> bool:
        """Tell whether an access touches a mark."""
        return bool(np.count_nonzero(self._elements[access.per].take(access.index)))

    def all(self, access: Access) -> bool:
        """Tell whether all is marked that an access touches."""
        found = self._elements[access.per].take(access.index) == self._marked[access.per]
        return bool(np.count_nonzero(found) == found.size)


class History:
    """The accesses of a batch of which a race may be part."""

    def __init__(self, lanes: Lanes, clocks: Clocks, count: int, granule: int) -> None:
        self.clocks = clocks
        self._lanes = lanes
        self.unit, self.units = clocks.unit, clocks.units
        self.writer = np.zeros(count, np.int32)  # record of the last write, 0: none
        self.writer_unit = np.zeros(count, np.int16)
        self.by_atomic = np.zeros(count, bool)
        self.readers = np.zeros((count, self.units), np.int32)  # of the last read per unit
        # Since a block's last barrier: who reads and writes, what is written and read, what is new
        # in the log.
        self._reading, self._writing = np.zeros((2, lanes.blocks), bool)
        self._any_writing = False
        self._fresh, self._touched = Marks(count, granule), Marks(count, granule)
        self._marked = 0  # reads of the log up to here are marked as touched
        self._log: list[Access] = []
        self._since = np.zeros(lanes.blocks, np.int64)
        self._all_blocks = np.ones(lanes.blocks, bool)
        self._blocks_of: tuple[Array, np.ndarray] = None, self._all_blocks
        lane = np.arange(lanes.blocks * lanes.threads)
        unit = lane // self.unit
        who = (lane % self.unit).astype(np.int32)
        self._every = {1: Threads(lane, unit, unit % self.units, who)}  # by granules an access

    # ------------------------------------------------------------------ the log
    def note(self, access: Access) -> None:
        """Log an access that has been checked."""
        doing = self._writing if access.is_write else self._reading
        doing |= self._blocks(access.mask)
        if access.is_write:
            self._any_writing = True
            self._fresh.set(access)
        self._log.append(access)
        if len(self._log) >= _MOST_LOGGED:
            self.settle()

    def meets_write(self, access: Access) -> bool:
        """Tell whether an access touches what was written since the last barrier."""
        return self._any_writing and self._fresh.any(access)

    def meets_read(self, access: Access) -> bool:
        """Tell whether an access touches what was read since the last barrier."""
        if not np.count_nonzero(self._reading & self._blocks(access.mask)):
            return False
        self._mark_reads()
        return self._touched.any(access)

    def _mark_reads(self) -> None:
        for place in range(self._marked, len(self._log)):
            access = self._log[place]
            if not access.is_write and self._current(place).any():
                self._touched.set(access)
        self._marked = len(self._log)

    def _current(self, place: int) -> np.ndarray:
        """Return for which blocks a place in the log is since their last barrier."""
        return (self._since <= place) & self._blocks(self._log[place].mask)

    def sync_blocks(self, which: np.ndarray | None) -> None:
        """Forget what the blocks in `which` (None: all) have done: all their threads know it."""
        rows = slice(None) if which is None else which
        self.clocks.sync_blocks(rows)
        for marks, doing in ((self._fresh, self._writing), (self._touched, self._reading)):
            if marks.used and doing[rows].any():
                marks.bytes.reshape(self._lanes.blocks, -1)[rows] = 0
                marks.used = bool(doing.sum() > doing[rows].sum())
        self._reading[rows] = self._writing[rows] = False
        self._any_writing = bool(self._writing.any())
        self._since[rows] = len(self._log)
        if not self._any_writing and not self._reading.any():
            self._clear()

    def _clear(self) -> None:
        self._log.clear()
        self._marked = 0
        self._since.fill(0)

    def _blocks(self, mask: Array) -> np.ndarray:
        """Return which blocks have lanes in a mask; the same one is asked for again and again."""
        if mask is None:
            return self._all_blocks
        if self._blocks_of[0] is not mask:
            self._blocks_of = mask, mask.any(1)
        return self._blocks_of[1]

    def settle(self) -> None:
        """Record what the log still has."""
        self._mark_reads()
        for place, access in enumerate(self._log):
            current = self._current(place)
            if not current.any():
                continue
            index, threads = self.granules(access, whole_warps=True)
            now = access.epoch.reshape(-1).take(threads.unit)
            if not current.all():
                kept = current.take(threads.unit // self.units)
                index, threads, now = index[kept], threads.chosen(kept), now[kept]
            if access.is_write:
                self.writer[index] = now * 64 + threads.who
                self.writer_unit[index] = threads.own
                self.by_atomic[index] = access.atomic
            else:
                self._record_read(index, threads, now, access.lanes is not None)
        self._clear()

    def _record_read(
        self, index: np.ndarray, threads: Threads, now: np.ndarray, collective: bool
    ) -> None:
        record = now * 64 + (COLLECTIVE if collective else threads.who)
        readers = self.readers.reshape(-1)
        cell = index * self.units + threads.own
        if self.unit == 1 and not collective:
            readers[cell] = record
            return
        before = readers.take(cell)
        again = ((before >> 6) == now) & (before != record)
        if collective:
            readers[cell] = np.where(again, before, record)
            return
        readers[cell] = np.where(again, now * 64 + MANY, record) if again.any() else record
        several = readers.take(cell) != record
        if several.any():
            readers[cell[several]] = now[several] * 64 + MANY

    # ------------------------------------------------------------------ whose, and where
    def granules(self, access: Access, *, whole_warps: bool = False) -> tuple[np.ndarray, Threads]:
        """Return the granules of an access, and who accesses each.

        A row that a warp loads belongs to the lane that gives its address, or with `whole_warps` to
        all 32, if lanes have clocks of their own: each gets something of it.
        """
        index, per = access.index, access.per
        if access.lanes is not None:
            lanes = access.lanes.repeat(per)
            index = self._each(index, per)
            if whole_warps and self.unit == 1:
                index = index.repeat(32)
                lanes = ((lanes & ~31)[:, None] + np.arange(32)).ravel()
            return index, self._threads(lanes)
        if access.mask is not None:
            return self._each(index, per), self._threads(np.flatnonzero(access.mask).repeat(per))
        if per not in self._every:
            self._every[per] = Threads(*(each.repeat(per) for each in self._every[1]))
        index = np.broadcast_to(index, self._lanes.shape).ravel()
        return self._each(index, per), self._every[per]

    def _each(self, index: np.ndarray, per: int) -> np.ndarray:
        return (index[:, None] * per + np.arange(per)).ravel() if per > 1 else index

    def _threads(self, lanes: np.ndarray) -> Threads:
        return Threads(*(each.take(lanes) for each in self._every[1]))
