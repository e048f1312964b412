"""Shared memory: reads of what was never written, and races.

Two accesses of different threads race if one is a write and no barrier orders them. Which barrier
orders what is kept in vector clocks, as in FastTrack (C. Flanagan, S. Freund, "FastTrack: efficient
and precise dynamic race detection", 2009). A clock belongs to a warp, in which lanes are known
apart: every warp counts epochs, one for each barrier it passes, and `seen[block, w, v]` is the last
epoch of warp v that a barrier has made visible to warp w. An access recorded in epoch e of warp v
is ordered before one of warp w now if e <= seen[w, v]. In a kernel with a ``bar.warp.sync`` of some
lanes of a warp, which orders those alone, every lane has a clock of its own: the same with "lane"
for "warp", and slower.

The unit of memory is a granule, the smallest size that the kernel accesses shared memory with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import SharedMemoryRaceError, UninitializedReadError
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.storage import Storage
from cupyattn.emulator.program import Program

__all__ = ["SharedMemoryTracker"]

Array = Any

# A record is epoch * 64 + who: a lane, several lanes, or the whole warp at once (ldmatrix).
_MANY = 32
_COLLECTIVE = 33
_WHO = 63


class _Threads(NamedTuple):
    """Who accesses what, an item an access."""

    lane: np.ndarray
    """Counted over the batch."""
    unit: np.ndarray
    """What has a clock: counted over the batch, and in its block."""
    own: np.ndarray
    who: np.ndarray
    """The lane, counted in its unit."""


class SharedMemoryTracker:
    """Last writer and last readers of every granule of a batch's shared memory."""

    def __init__(self, lanes: Lanes, checks: Checks, storage: Storage) -> None:
        self.lanes = lanes
        self.checks = checks
        self.storage = storage
        self.races = checks.races
        self.granule = lanes.program.shared_granule
        self.stride = storage.stride // self.granule
        count = lanes.blocks * self.stride
        self.unit = 1 if lanes.program.partial_warp_barriers else 32  # lanes that share a clock
        self.units = units = lanes.threads // self.unit
        self.written = np.zeros(count, bool)
        if self.races:
            self.epoch = np.ones((lanes.blocks, units), np.int32)
            self.seen = np.zeros((lanes.blocks, units, units), np.int32)
            self.writer = np.zeros(count, np.int32)  # record of the last write, 0: none
            self.writer_unit = np.zeros(count, np.int16)
            self.by_atomic = np.zeros(count, bool)
            self.readers = np.zeros((count, units), np.int32)  # record of the last read per unit
            self.pending: dict[tuple[int, int], np.ndarray] = {}
        lane = np.arange(lanes.blocks * lanes.threads)
        unit = lane // self.unit
        every = _Threads(lane, unit, unit % units, (lane % self.unit).astype(np.int32))
        self.every = {1: every}  # all threads, by how many granules each accesses

    @staticmethod
    def bytes_per_block(program: Program, shared_bytes: int, threads: int) -> int:
        """Return the size of the records for one block."""
        units = threads // (1 if program.partial_warp_barriers else 32)
        return 4 * (-(-shared_bytes // program.shared_granule) * (units + 3) + units * units)

    # ------------------------------------------------------------------ accesses
    def _granules(self, index: Array, size: int, mask: Array) -> tuple[np.ndarray, _Threads]:
        """Return the granules of accesses at `index` (in units of `size`), and whose they are."""
        per = size // self.granule
        if mask is not None:
            return self._each(index, per), self._threads(np.flatnonzero(mask).repeat(per))
        if per not in self.every:
            self.every[per] = _Threads(*(each.repeat(per) for each in self.every[1]))
        return self._each(np.broadcast_to(index, self.lanes.shape).ravel(), per), self.every[per]

    def _each(self, index: np.ndarray, per: int) -> np.ndarray:
        return (index[:, None] * per + np.arange(per)).ravel() if per > 1 else index

    def _threads(self, lanes: np.ndarray) -> _Threads:
        return _Threads(*(each.take(lanes) for each in self.every[1]))

    def read(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and record loads."""
        index, threads = self._granules(index, size, mask)
        if index.size:
            self._check_written(index, threads, site)
            if self.races:
                self._read(index, threads, site, collective=False)

    def read_rows(self, index: np.ndarray, lanes: np.ndarray, site: int) -> None:
        """Check and record the 16-byte rows that whole warps load at once (``ldmatrix``)."""
        per = 16 // self.granule
        index, lanes = self._each(index, per), lanes.repeat(per)
        threads = self._threads(lanes)
        self._check_written(index, threads, site)
        if not self.races:
            return
        if self.unit == 1:  # all lanes of the warp get something of every row
            threads = self._threads(((lanes & ~31)[:, None] + np.arange(32)).ravel())
            index = np.repeat(index, 32)
        self._read(index, threads, site, collective=True)

    def write(self, index: Array, values: np.ndarray, mask: Array, site: int) -> None:
        """Check and record stores, before they happen."""
        index, threads = self._granules(index, values.itemsize, mask)
        if not index.size:
            return
        if self.races:
            granules = np.ascontiguousarray(values).reshape(-1).view(f"u{self.granule}")
            memory = self.storage.views[self.granule]
            changes = memory.take(index) != granules  # equal writes do not race with each other
            self._write(index, threads, site, False, changes)
        self.written[index] = True

    def after_write(
        self, elements: np.ndarray, index: Array, values: np.ndarray, mask: Array, site: int
    ) -> None:
        """Refuse one instruction's stores of different values to one address."""
        if not self.races:
            return
        unit = f"u{min(values.itemsize, 8)}"
        stored = np.ascontiguousarray(elements.take(index)).reshape(-1, 1).view(unit)
        wanted = np.ascontiguousarray(values).reshape(-1, 1).view(unit)
        lost = (stored != wanted).any(1)
        if lost.any():
            raise self.lanes.fault(
                SharedMemoryRaceError,
                "shared-memory race: threads store different values to one address with one "
                "instruction",
                site,
                self.lanes.numbers(
                    lost if mask is not None else lost.reshape(self.lanes.shape), mask
                ),
            )

    def atomic(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and record atomic updates: they race with loads and stores, not with each other."""
        index, threads = self._granules(index, size, mask)
        if not index.size:
            return
        self._check_written(index, threads, site)
        if self.races:
            self._write(index, threads, site, True, np.ones(index.shape, bool))
        self.written[index] = True

    def _check_written(self, index: np.ndarray, threads: _Threads, site: int) -> None:
        if not self.checks.uninitialized:
            return
        written = self.written.take(index)
        if not written.all():
            bad = ~written
            offset = int(index[bad][0]) % self.stride * self.granule
            raise self.lanes.fault(
                UninitializedReadError,
                f"read of shared memory at byte {offset} that no thread has written"
                f"{self.storage.nearest(offset)}",
                site,
                np.unique(threads.lane[bad]),
            )

    def _after_writes(
        self, index: np.ndarray, unit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which granules hold a write not yet visible, its record and its unit."""
        writer = self.writer.take(index)
        writer_unit = self.writer_unit.take(index)
        visible = self.seen.reshape(-1).take(unit * self.units + writer_unit)
        return (writer >> 6) > visible, writer, writer_unit

    def _read(self, index: np.ndarray, threads: _Threads, site: int, collective: bool) -> None:
        _, unit, own, who = threads
        bad, writer, writer_unit = self._after_writes(index, unit)
        if bad.any():
            if not collective or self.unit == 1:  # a thread sees its own write
                bad &= (writer_unit != own) | ((writer & _WHO) != who)
            if bad.any():
                self._race(index, threads, site, "reads", bad, writer_unit, writer, "written")
        now = self.epoch.reshape(-1).take(unit)
        record = now * 64 + (_COLLECTIVE if collective else who)
        readers = self.readers.reshape(-1)
        cell = index * self.units + own
        if self.unit == 1 and not collective:
            readers[cell] = record
            return
        before = readers.take(cell)
        again = ((before >> 6) == now) & (before != record)
        if collective:
            readers[cell] = np.where(again, before, record)
            return
        readers[cell] = np.where(again, now * 64 + _MANY, record) if again.any() else record
        several = readers.take(cell) != record
        if several.any():
            readers[cell[several]] = now[several] * 64 + _MANY

    def _write(
        self, index: np.ndarray, threads: _Threads, site: int, atomic: bool, changes: np.ndarray
    ) -> None:
        _, unit, own, who = threads
        bad, writer, writer_unit = self._after_writes(index, unit)
        if bad.any():
            bad &= ((writer_unit != own) | ((writer & _WHO) != who)) & changes
            if atomic:
                bad &= ~self.by_atomic.take(index)
            if bad.any():
                self._race(index, threads, site, "writes", bad, writer_unit, writer, "written")
        readers = self.readers.take(index, axis=0)
        unseen: Any = (readers >> 6) > self.seen.reshape(-1, self.units).take(unit, axis=0)
        if unseen.any():
            row = np.arange(index.size)
            unseen[row, own] &= (readers[row, own] & _WHO) != who
            # what the warp read all together, it has read before any of its lanes goes on
            warp_of_unit = np.arange(self.units) * self.unit // 32
            same_warp = warp_of_unit == warp_of_unit.take(own)[:, None]
            unseen &= ~(same_warp & ((readers & _WHO) == _COLLECTIVE))
            bad = unseen.any(1)
            if bad.any():
                reader_unit = unseen.argmax(1)
                reader = readers[row, reader_unit]
                self._race(index, threads, site, "writes", bad, reader_unit, reader, "read")
        self.writer[index] = self.epoch.reshape(-1).take(unit) * 64 + who
        self.writer_unit[index] = own
        self.by_atomic[index] = atomic

    def _race(
        self,
        index: np.ndarray,
        threads: _Threads,
        site: int,
        verb: str,
        bad: np.ndarray,
        other_unit: np.ndarray,
        other: np.ndarray,
        participle: str,
    ) -> None:
        first = int(np.argmax(bad))
        offset = int(index[first]) % self.stride * self.granule
        who = int(other[first]) & _WHO
        other_warp, other_lane = divmod(int(other_unit[first]) * self.unit, 32)
        lane = f"lane {other_lane + who}" if who < _MANY else "several lanes"
        relation = "no barrier"
        if int(threads.lane[first]) // 32 % self.lanes.warps == other_warp:
            relation = "no bar.warp.sync (__syncwarp)" + " of both" * (self.unit == 1)
        raise self.lanes.fault(
            SharedMemoryRaceError,
            f"shared-memory race: the thread {verb} byte {offset}"
            f"{self.storage.nearest(offset)}, {participle} by {lane} of warp "
            f"{other_warp} of the block, and {relation} lies between",
            site,
            np.unique(threads.lane[bad]),
        )

    # ------------------------------------------------------------------ barriers
    def _join(self, block: int, units: np.ndarray, extra: np.ndarray | None = None) -> None:
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

    def sync_blocks(self, which: np.ndarray | None) -> None:
        """Let all threads of the blocks in `which` (None: of every block) pass a barrier."""
        if not self.races:
            return
        rows = slice(None) if which is None else which
        self.seen[rows] = self.epoch[rows][:, None, :]
        self.epoch[rows] += 1

    def sync_groups(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` pass the barriers whose ids `identifier` holds per lane."""
        if not self.races:
            return
        ids = self._identifiers(lanes, identifier)
        for block in np.flatnonzero((ids >= 0).any(1)):
            for number in np.unique(ids[block]):
                if number >= 0:
                    units = np.flatnonzero(ids[block] == number)
                    self._join(int(block), units, self.pending.pop((int(block), int(number)), None))

    def forget_arrivals(self, barriers: np.ndarray) -> None:
        """Drop what was announced at the marked (block, barrier)s: they opened for nobody."""
        for block, number in np.argwhere(barriers):
            self.pending.pop((int(block), int(number)), None)

    def arrive(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` announce what they have done, without waiting."""
        if not self.races:
            return
        ids = self._identifiers(lanes, identifier)
        for block, unit in np.argwhere(ids >= 0):
            known = self.seen[block, unit].copy()
            known[unit] = self.epoch[block, unit]
            key = (int(block), int(ids[block, unit]))
            before = self.pending.get(key)
            self.pending[key] = known if before is None else np.maximum(before, known)
            self.seen[block, unit, unit] = self.epoch[block, unit]
            self.epoch[block, unit] += 1

    def sync_warps(self, mask: np.ndarray | None, named: Array) -> None:
        """Let the lanes of `mask` (None: all) meet those that they name (``bar.warp.sync``)."""
        if not self.races:
            return
        shape, warps = self.lanes.shape, (self.lanes.blocks, self.lanes.warps)
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
