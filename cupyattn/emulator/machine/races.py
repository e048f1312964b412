"""Reads of shared memory that was never written, and races.

Two accesses of different threads race if one is a write and no barrier orders them. `Clocks` knows
what barriers order, `History` who has accessed what.

`Clocks` are vector clocks, as in FastTrack (C. Flanagan, S. Freund, "FastTrack: efficient and
precise dynamic race detection", 2009). A clock belongs to a *unit*: a warp, in which lanes are
known apart, or, in a kernel with a ``bar.warp.sync`` of some lanes of a warp, which orders those
alone, a lane. Every unit counts epochs, one for each barrier it passes, and `seen[block, w, v]` is
the last epoch of unit v that a barrier has made visible to unit w. What unit v did in epoch e is
ordered before what unit w does now if e <= seen[block, w, v].

`History` records the last store of every granule, and its last read and its last atomic update by
each unit: atomic updates are not ordered by one another. A granule is the smallest size that the
kernel accesses shared memory with. Most of these records would never be
looked at: a barrier of the whole block orders all that came before it. So accesses are logged
first, and recorded (`settle`) only when one meets another since the block's last such barrier: each
marks the granules that it touches. At the barrier the block's part of the log is forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import SharedMemoryRaceError, UninitializedReadError
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask
from cupyattn.emulator.machine.memory import ELEMENT, SlicedBuffer
from cupyattn.emulator.program import Program


class Clocks:
    """The epochs of a batch.

    Attributes
    ----------
    unit : int
        Lanes that share a clock: 32 or 1.
    units : int
        Clocks of a block.
    epoch : (blocks, units) int32 array
        Each barrier makes another array, so that a kept one stays as it was.
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

    def sync_warps(self, mask: Mask, named: Array) -> None:
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
        busy: np.ndarray | np.bool_ = np.ones(warps, bool)
        if mask is not None:
            busy = mask.reshape(*warps, 32).any(2)
        block, warp = np.nonzero(busy)
        self.seen[block, warp, warp] = self.epoch[block, warp]
        self.epoch[block, warp] += 1


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
    who: np.ndarray
    """The lane, counted in its unit."""

    def chosen(self, these: np.ndarray) -> Threads:
        """Return those of a mask."""
        return Threads(*(each[these] for each in self))


Accesses = tuple[np.ndarray, np.ndarray]
"""The unit and the record of earlier accesses, one of each granule."""


class LoggedAccess(NamedTuple):
    """An access as it happened, in elements of `per` granules."""

    index: Any  # an array; tuple.index is a method
    per: int
    mask: Mask
    lanes: np.ndarray | None
    """The lanes of the rows that whole warps load; None where the mask tells which lanes access."""
    epoch: np.ndarray
    is_write: bool
    atomic: bool


class Marks:
    """A mark for each granule. Accesses of several granules see their marks as one element."""

    def __init__(self, count: int, granule: int) -> None:
        self.bytes = np.zeros(count, np.uint8)
        self.used = False
        sizes = [per for per in ELEMENT if per * granule <= 16]
        self._elements = {per: self.bytes.view(ELEMENT[per]) for per in sizes}
        self._marked = {per: np.ones(per, np.uint8).view(ELEMENT[per])[0] for per in sizes}

    def set(self, access: LoggedAccess) -> None:
        """Mark all that an access touches."""
        self.used = True
        self._elements[access.per][access.index] = self._marked[access.per]

    def clear(self, access: LoggedAccess) -> None:
        """Remove the marks of all that an access touches."""
        self._elements[access.per][access.index] = 0

    def any(self, access: LoggedAccess) -> bool:
        """Tell whether an access touches a mark."""
        return bool(np.count_nonzero(self._elements[access.per].take(access.index)))

    def all(self, access: LoggedAccess) -> bool:
        """Tell whether all is marked that an access touches."""
        found = self._elements[access.per].take(access.index) == self._marked[access.per]
        return bool(np.count_nonzero(found) == found.size)


class History:
    """The accesses of a batch that may be part of a race."""

    def __init__(self, lanes: Lanes, clocks: Clocks, count: int, granule: int) -> None:
        self.clocks = clocks
        self._lanes = lanes
        self.unit, self.units = clocks.unit, clocks.units
        self.writer = np.zeros(count, np.int32)  # record of the last store, 0: none
        self.writer_unit = np.zeros(count, np.int16)
        self.readers = np.zeros((count, self.units), np.int32)  # of the last read per unit
        self.updaters: np.ndarray | None = None  # of the last atomic update per unit, if there are
        # Since a block's last barrier: who reads and writes, what is written and read, what is new
        # in the log.
        self._reading, self._writing = np.zeros((2, lanes.blocks), bool)
        self._any_writing = False
        self._fresh, self._touched = Marks(count, granule), Marks(count, granule)
        self._marked = 0  # reads of the log up to here are marked as touched
        self._log: list[LoggedAccess] = []
        self._since = np.zeros(lanes.blocks, np.int64)
        self._all_blocks = np.ones(lanes.blocks, bool)
        self._blocks_of: tuple[Mask, Array | np.bool_] = None, self._all_blocks
        lane = np.arange(lanes.blocks * lanes.threads)
        unit = lane // self.unit
        who = (lane % self.unit).astype(np.int32)
        self._every = {1: Threads(lane, unit, unit % self.units, who)}  # by granules an access

    # ------------------------------------------------------------------ the log
    def note(self, access: LoggedAccess) -> None:
        """Log an access that has been checked."""
        doing = self._writing if access.is_write else self._reading
        doing |= self._blocks(access.mask)
        if access.is_write:
            self._any_writing = True
            self._fresh.set(access)
        self._log.append(access)
        if len(self._log) >= _MOST_LOGGED:
            self.settle()

    def meets_write(self, access: LoggedAccess) -> bool:
        """Tell whether an access touches what was written since the last barrier."""
        return self._any_writing and self._fresh.any(access)

    def meets_read(self, access: LoggedAccess) -> bool:
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

    def _blocks(self, mask: Mask) -> Array | np.bool_:
        """Return which blocks have lanes in a mask; cached for the same mask."""
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
            if not access.is_write:
                self._record(self.readers, index, threads, now, access.lanes is not None)
            elif access.atomic:
                if self.updaters is None:
                    self.updaters = np.zeros_like(self.readers)
                self._record(self.updaters, index, threads, now)
            else:
                self.writer[index] = now * 64 + threads.who
                self.writer_unit[index] = threads.own
        self._clear()

    def _record(
        self,
        table: np.ndarray,
        index: np.ndarray,
        threads: Threads,
        now: np.ndarray,
        collective: bool = False,
    ) -> None:
        """Record the last access of each unit: reads, or atomic updates."""
        record = now * 64 + (COLLECTIVE if collective else threads.who)
        readers = table.reshape(-1)
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

    # ------------------------------------------------------------------ threads and granules
    def granules(
        self, access: LoggedAccess, *, whole_warps: bool = False
    ) -> tuple[np.ndarray, Threads]:
        """Return the granules of an access, and who accesses each.

        A row that a warp loads belongs to the lane that gives its address, or with `whole_warps` to
        all 32 if each lane has a clock: each gets something of it.
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


class CopiesOnTheirWay(Protocol):
    """Bytes of shared memory that no access may touch (`async_copies`)."""

    def check(self, access: LoggedAccess, site: int) -> None:
        """Refuse an access to them."""


class SharedMemoryTracker:
    """Checks every access to a batch's shared memory."""

    def __init__(self, lanes: Lanes, checks: Checks, storage: SlicedBuffer) -> None:
        self.lanes = lanes
        self.checks = checks
        self.storage = storage
        self.races = checks.races
        self.granule = lanes.program.shared_granule
        self.stride = storage.stride // self.granule
        count = lanes.blocks * self.stride
        self.clocks = Clocks(lanes)
        self.history = History(lanes, self.clocks, count, self.granule)
        self.written = Marks(count, self.granule)
        self.copies: CopiesOnTheirWay | None = None  # while there are any on their way

    @staticmethod
    def bytes_per_block(program: Program, shared_bytes: int, threads: int) -> int:
        """Return the size of the records for one block."""
        units = threads // (1 if program.partial_warp_barriers else 32)
        opcodes = (x.opcode.split(".") for x in program.instructions)
        updates = any(root in ("atom", "red") and "shared" in parts for root, *parts in opcodes)
        records = units * (2 if updates else 1) + 2
        return 4 * (-(-shared_bytes // program.shared_granule) * records + units * units)

    # ------------------------------------------------------------------ accesses
    def access(
        self,
        index: Array,
        size: int,
        mask: Mask,
        *,
        lanes: np.ndarray | None = None,
        is_write: bool = False,
        atomic: bool = False,
    ) -> LoggedAccess:
        """Describe an access by index in elements of `size` bytes."""
        epoch = self.clocks.epoch
        return LoggedAccess(index, size // self.granule, mask, lanes, epoch, is_write, atomic)

    def read(self, index: Array, size: int, mask: Mask, site: int) -> None:
        """Check and note loads."""
        self._read(self.access(index, size, mask), site)

    def read_rows(self, index: np.ndarray, lanes: np.ndarray, mask: Mask, site: int) -> None:
        """Check and note the 16-byte rows that whole warps load at once (``ldmatrix``)."""
        self._read(self.access(index, 16, mask, lanes=lanes), site)

    def _read(self, access: LoggedAccess, site: int) -> None:
        if not access.index.size:
            return
        if self.copies is not None:
            self.copies.check(access, site)
        self._check_written(access, site)
        if self.races:
            if self.history.meets_write(access):
                self.history.settle()
                self._check_read(access, site)
            self.history.note(access)

    def write(self, index: Array, values: np.ndarray, mask: Mask, site: int) -> None:
        """Check and note stores, before they happen."""
        self._write(self.access(index, values.itemsize, mask, is_write=True), values, site)

    def atomic(self, index: Array, size: int, mask: Mask, site: int) -> None:
        """Check and note atomic updates: they race with loads and stores, not with each other."""
        access = self.access(index, size, mask, is_write=True, atomic=True)
        if self.copies is not None:
            self.copies.check(access, site)
        if index.size:
            self._check_written(access, site)
        self._write(access, None, site)

    def _write(self, access: LoggedAccess, values: np.ndarray | None, site: int) -> None:
        if not access.index.size:
            return
        if self.copies is not None:
            self.copies.check(access, site)
        if self.races:
            self.check_store(access, values, site)
            self.history.note(access)
        self.written.set(access)

    def check_store(self, access: LoggedAccess, values: np.ndarray | None, site: int) -> None:
        """Refuse a store that races with what other threads have done."""
        if self.history.meets_read(access) or self.history.meets_write(access):
            self.history.settle()
            self._check_write(access, values, site)

    def arrive(self, index: Array, size: int, mask: Mask) -> None:
        """Note the bytes of copies that arrive (``cp.async``): stores, checked at their start."""
        access = self.access(index, size, mask, is_write=True)
        if self.races:
            self.history.note(access)
        self.written.set(access)

    def after_write(
        self, elements: np.ndarray, index: Array, values: np.ndarray, mask: Mask, site: int
    ) -> None:
        """Refuse one instruction's stores of different values to one address."""
        if not self.races:
            return
        unit = f"u{min(values.itemsize, 8)}"
        stored = np.ascontiguousarray(elements.take(index)).reshape(-1, 1).view(unit)
        wanted = np.ascontiguousarray(values).reshape(-1, 1).view(unit)
        differs = stored != wanted
        if np.count_nonzero(differs):
            lost = differs.any(1)
            raise self.lanes.fault(
                SharedMemoryRaceError,
                "shared-memory race: threads store different values to one address with one "
                "instruction",
                site,
                self.lanes.numbers(
                    lost if mask is not None else lost.reshape(self.lanes.shape), mask
                ),
            )

    # ------------------------------------------------------------------ checks
    def _check_written(self, access: LoggedAccess, site: int) -> None:
        if not self.checks.uninitialized or self.written.all(access):
            return
        index, threads = self.history.granules(access)
        bad = self.written.bytes.take(index) == 0
        offset = int(index[bad][0]) % self.stride * self.granule
        raise self.lanes.fault(
            UninitializedReadError,
            f"read of shared memory at byte {offset} that no thread has written"
            f"{self.storage.nearest(offset)}",
            site,
            np.unique(threads.lane[bad]),
        )

    def _stored(
        self, index: np.ndarray, threads: Threads
    ) -> tuple[np.ndarray, np.ndarray, Accesses]:
        """Return which granules hold a store not yet visible, which the thread's own, and whose."""
        writer = self.history.writer.take(index)
        writer_unit = self.history.writer_unit.take(index)
        seen = self.clocks.seen.reshape(-1)
        visible = seen.take(threads.unit * self.clocks.units + writer_unit)
        own = (writer_unit == threads.own) & ((writer & WHO) == threads.who)
        return (writer >> 6) > visible, own, (writer_unit, writer)

    def _unseen(
        self, table: np.ndarray, index: np.ndarray, threads: Threads, *, own: bool = True
    ) -> tuple[np.ndarray, Accesses]:
        """Return which granules have an access in a table not yet visible, and whose.

        With `own`, a thread sees its own.
        """
        units = self.clocks.units
        records = table.take(index, axis=0)
        seen = self.clocks.seen.reshape(-1, units).take(threads.unit, axis=0)
        unseen: Any = (records >> 6) > seen
        row = np.arange(index.size)
        if unseen.any():
            if own:
                unseen[row, threads.own] &= (records[row, threads.own] & WHO) != threads.who
            # a read of the whole warp is over before any of its lanes goes on
            warp_of_unit = np.arange(units) * self.clocks.unit // 32
            same_warp = warp_of_unit == warp_of_unit.take(threads.own)[:, None]
            unseen &= ~(same_warp & ((records & WHO) == COLLECTIVE))
        first = unseen.argmax(1)
        return unseen.any(1), (first, records[row, first])

    def _check_read(self, access: LoggedAccess, site: int) -> None:
        index, threads = self.history.granules(access, whole_warps=True)
        sees_own = access.lanes is None or self.clocks.unit == 1
        bad, own, whose = self._stored(index, threads)
        if sees_own:
            bad &= ~own
        if bad.any():
            self._race(index, threads, site, "reads", bad, whose, "written")
        self._check_updates(index, threads, site, "reads", own=sees_own)

    def _check_write(self, access: LoggedAccess, values: np.ndarray | None, site: int) -> None:
        index, threads = self.history.granules(access)
        bad, own, whose = self._stored(index, threads)
        bad &= ~own
        if bad.any() and values is not None:  # equal stores do not race with each other
            granules = np.ascontiguousarray(values).reshape(-1).view(f"u{self.granule}")
            bad &= self.storage.views[self.granule].take(index) != granules
        if bad.any():
            self._race(index, threads, site, "writes", bad, whose, "written")
        if values is not None:
            self._check_updates(index, threads, site, "writes")
        bad, whose = self._unseen(self.history.readers, index, threads)
        if bad.any():
            self._race(index, threads, site, "writes", bad, whose, "read")

    def _check_updates(
        self, index: np.ndarray, threads: Threads, site: int, verb: str, *, own: bool = True
    ) -> None:
        """Refuse loads and stores that no barrier orders after another thread's atomic update."""
        if self.history.updaters is None:
            return
        bad, whose = self._unseen(self.history.updaters, index, threads, own=own)
        if bad.any():
            self._race(index, threads, site, verb, bad, whose, "written")

    def _race(
        self,
        index: np.ndarray,
        threads: Threads,
        site: int,
        verb: str,
        bad: np.ndarray,
        whose: Accesses,
        participle: str,
    ) -> None:
        other_unit, other = whose
        first = int(np.argmax(bad))
        offset = int(index[first]) % self.stride * self.granule
        who = int(other[first]) & WHO
        unit = self.clocks.unit
        other_warp, other_lane = divmod(int(other_unit[first]) * unit, 32)
        lane = f"lane {other_lane + who}" if who < MANY else "several lanes"
        relation = "no barrier"
        if int(threads.lane[first]) // 32 % self.lanes.warps == other_warp:
            relation = "no bar.warp.sync (__syncwarp)" + " of both" * (unit == 1)
        raise self.lanes.fault(
            SharedMemoryRaceError,
            f"shared-memory race: the thread {verb} byte {offset}"
            f"{self.storage.nearest(offset)}, {participle} by {lane} of warp "
            f"{other_warp} of the block, and {relation} lies between",
            site,
            np.unique(threads.lane[bad]),
        )
