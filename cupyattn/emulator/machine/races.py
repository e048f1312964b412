"""Shared memory: reads of what was never written, and races.

Two accesses of different threads race if one is a write and no barrier orders them. Which barrier
orders what is kept in vector clocks, as in FastTrack (C. Flanagan, S. Freund, "FastTrack: efficient
and precise dynamic race detection", 2009), with a warp as the unit between warps and a lane inside
a warp: every warp counts epochs, one per barrier that it passes, and `seen[block, w, v]` is the
last epoch of warp v that a barrier has made visible to warp w. An access recorded in epoch e of
warp v is ordered before one of warp w now if e <= seen[w, v].

The unit of memory is a granule, the smallest size that the kernel accesses shared memory with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.emulator.errors import SharedMemoryRaceError, UninitializedReadError

if TYPE_CHECKING:
    from cupyattn.emulator.machine.batch import Batch

__all__ = ["SharedMemoryTracker"]

Array = Any

# A record is epoch * 64 + who: a lane, several lanes, or the whole warp at once (ldmatrix).
_MANY = 32
_COLLECTIVE = 33
_WHO = 63


class SharedMemoryTracker:
    """Last writer and last readers of every granule of a batch's shared memory."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.races = batch.checks.races
        self.granule = batch.program.shared_granule
        self.stride = -(-max(batch.launch.shared_bytes, 16) // 16) * 16 // self.granule
        count = batch.blocks * self.stride
        warps = batch.warps
        self.written = np.zeros(count, bool)
        if self.races:
            self.epoch = np.ones((batch.blocks, warps), np.int32)
            self.seen = np.zeros((batch.blocks, warps, warps), np.int32)
            self.writer = np.zeros(count, np.int32)  # record of the last write, 0: none
            self.writer_warp = np.zeros(count, np.int16)
            self.by_atomic = np.zeros(count, bool)
            self.readers = np.zeros((count, warps), np.int32)  # record of the last read per warp
            self.pending: dict[tuple[int, int], np.ndarray] = {}
        self.lane = np.arange(batch.blocks * batch.threads, dtype=np.int32)

    # ------------------------------------------------------------------ accesses
    def _granules(
        self, index: Array, size: int, mask: Array, lanes: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the granules of accesses at `index` (in units of `size`), and their lanes."""
        if lanes is None:
            if mask is None:
                lanes = self.lane
                index = np.broadcast_to(index, self.batch.shape).ravel()
            else:
                lanes = self.lane.reshape(self.batch.shape)[mask]
        per = size // self.granule
        if per > 1:
            index = (index[:, None] * per + np.arange(per)).ravel()
            lanes = np.repeat(lanes, per)
        return index, lanes

    def read(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and record loads."""
        index, lanes = self._granules(index, size, mask, None)
        if index.size:
            self._check_written(index, lanes, site)
            if self.races:
                self._read(index, lanes, site, collective=False)

    def read_rows(self, index: np.ndarray, lanes: np.ndarray, site: int) -> None:
        """Check and record the 16-byte rows that whole warps load at once (``ldmatrix``)."""
        index, lanes = self._granules(index, 16, None, lanes)
        self._check_written(index, lanes, site)
        if self.races:
            self._read(index, lanes, site, collective=True)

    def write(self, index: Array, values: np.ndarray, mask: Array, site: int) -> None:
        """Check and record stores, before they happen."""
        index, lanes = self._granules(index, values.itemsize, mask, None)
        if not index.size:
            return
        if self.races:
            granules = np.ascontiguousarray(values).reshape(-1).view(f"u{self.granule}")
            memory = self.batch.shared.views[self.granule]
            changes = memory.take(index) != granules  # writing what is there already is no race
            self._write(index, lanes, site, False, changes)
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
            raise self.batch.fault(
                SharedMemoryRaceError,
                "shared-memory race: threads store different values to one address with one "
                "instruction",
                site,
                self.batch.lanes(
                    lost if mask is not None else lost.reshape(self.batch.shape), mask
                ),
            )

    def atomic(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and record atomic updates: they race with loads and stores, not with each other."""
        index, lanes = self._granules(index, size, mask, None)
        if not index.size:
            return
        self._check_written(index, lanes, site)
        if self.races:
            self._write(index, lanes, site, True, np.ones(index.shape, bool))
        self.written[index] = True

    def _check_written(self, index: np.ndarray, lanes: np.ndarray, site: int) -> None:
        if not self.batch.checks.uninitialized:
            return
        written = self.written.take(index)
        if not written.all():
            bad = ~written
            offset = int(index[bad][0]) % self.stride * self.granule
            raise self.batch.fault(
                UninitializedReadError,
                f"read of shared memory at byte {offset} that no thread has written"
                f"{self.batch.shared.nearest(offset)}",
                site,
                np.unique(lanes[bad]),
            )

    def _after_writes(
        self, index: np.ndarray, warp: np.ndarray, own: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which granules hold a write not yet visible, its record and its warp."""
        writer = self.writer.take(index)
        writer_warp = self.writer_warp.take(index)
        visible = self.seen.reshape(-1).take(warp * self.batch.warps + writer_warp)
        return (writer >> 6) > visible, writer, writer_warp

    def _read(self, index: np.ndarray, lanes: np.ndarray, site: int, collective: bool) -> None:
        warps = self.batch.warps
        warp = (lanes >> 5).astype(np.int64)  # counted over the batch
        own = warp % warps
        who = _COLLECTIVE if collective else lanes & 31
        bad, writer, writer_warp = self._after_writes(index, warp, own)
        if bad.any():
            if not collective:  # a thread sees its own write
                bad &= (writer_warp != own) | ((writer & _WHO) != who)
            if bad.any():
                self._race(index, lanes, site, "reads", bad, writer_warp, writer, "written")
        now = self.epoch.reshape(-1).take(warp)
        record = now * 64 + who
        readers = self.readers.reshape(-1)
        cell = index * warps + own
        before = readers.take(cell)
        again = ((before >> 6) == now) & (before != record)
        if collective:
            readers[cell] = np.where(again, before, record)
            return
        readers[cell] = np.where(again, now * 64 + _MANY, record)
        several = readers.take(cell) != record
        if several.any():
            readers[cell[several]] = now[several] * 64 + _MANY

    def _write(
        self, index: np.ndarray, lanes: np.ndarray, site: int, atomic: bool, changes: np.ndarray
    ) -> None:
        warps = self.batch.warps
        warp = (lanes >> 5).astype(np.int64)
        own = warp % warps
        who = lanes & 31
        bad, writer, writer_warp = self._after_writes(index, warp, own)
        if bad.any():
            bad &= ((writer_warp != own) | ((writer & _WHO) != who)) & changes
            if atomic:
                bad &= ~self.by_atomic.take(index)
            if bad.any():
                self._race(index, lanes, site, "writes", bad, writer_warp, writer, "written")
        readers = self.readers.take(index, axis=0)
        unseen: Any = (readers >> 6) > self.seen.reshape(-1, warps).take(warp, axis=0)
        if unseen.any():
            row = np.arange(index.size)
            mine = readers[row, own] & _WHO
            unseen[row, own] &= (mine != who) & (mine != _COLLECTIVE)
            unseen &= changes[:, None]
            bad = unseen.any(1)
            if bad.any():
                reader_warp = unseen.argmax(1)
                reader = readers[row, reader_warp]
                self._race(index, lanes, site, "writes", bad, reader_warp, reader, "read")
        self.writer[index] = self.epoch.reshape(-1).take(warp) * 64 + who
        self.writer_warp[index] = own
        self.by_atomic[index] = atomic

    def _race(
        self,
        index: np.ndarray,
        lanes: np.ndarray,
        site: int,
        verb: str,
        bad: np.ndarray,
        other_warp: np.ndarray,
        other: np.ndarray,
        participle: str,
    ) -> None:
        first = int(np.argmax(bad))
        offset = int(index[first]) % self.stride * self.granule
        who = int(other[first]) & _WHO
        lane = f"lane {who}" if who < _MANY else "several lanes"
        relation = (
            "no bar.warp.sync (__syncwarp)"
            if int(lanes[first]) // 32 % self.batch.warps == int(other_warp[first])
            else "no barrier"
        )
        raise self.batch.fault(
            SharedMemoryRaceError,
            f"shared-memory race: the thread {verb} byte {offset}"
            f"{self.batch.shared.nearest(offset)}, {participle} by {lane} of warp "
            f"{int(other_warp[first])} of the block, and {relation} lies between",
            site,
            np.unique(lanes[bad]),
        )

    # ------------------------------------------------------------------ barriers
    def _join(self, block: int, warps: np.ndarray, extra: np.ndarray | None = None) -> None:
        seen, epoch = self.seen[block], self.epoch[block]
        known = seen[warps].max(0)
        if extra is not None:
            known = np.maximum(known, extra)
        known[warps] = epoch[warps]
        seen[warps] = known
        epoch[warps] += 1

    def sync_blocks(self, which: np.ndarray | None) -> None:
        """Let all warps of the blocks in `which` (None: of every block) pass a barrier."""
        if not self.races:
            return
        rows = slice(None) if which is None else which
        self.seen[rows] = self.epoch[rows][:, None, :]
        self.epoch[rows] += 1

    def sync_groups(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` pass the barriers whose ids `identifier` holds per lane."""
        if not self.races:
            return
        batch = self.batch
        warp_ids = np.where(lanes, identifier, -1).reshape(batch.blocks, batch.warps, 32).max(2)
        for block in np.flatnonzero((warp_ids >= 0).any(1)):
            for number in np.unique(warp_ids[block]):
                if number >= 0:
                    warps = np.flatnonzero(warp_ids[block] == number)
                    self._join(int(block), warps, self.pending.pop((int(block), int(number)), None))

    def arrive(self, lanes: np.ndarray, identifier: np.ndarray) -> None:
        """Let the warps of `lanes` announce what they have done, without waiting."""
        if not self.races:
            return
        batch = self.batch
        warp_ids = np.where(lanes, identifier, -1).reshape(batch.blocks, batch.warps, 32).max(2)
        for block, warp in np.argwhere(warp_ids >= 0):
            known = self.seen[block, warp].copy()
            known[warp] = self.epoch[block, warp]
            key = (int(block), int(warp_ids[block, warp]))
            before = self.pending.get(key)
            self.pending[key] = known if before is None else np.maximum(before, known)
            self.seen[block, warp, warp] = self.epoch[block, warp]
            self.epoch[block, warp] += 1

    def sync_warps(self, mask: np.ndarray | None, named: Array) -> None:
        """Let the lanes of the same warp wait for each other (``bar.warp.sync``)."""
        if not self.races:
            return
        batch = self.batch
        here: Any = np.ones((batch.blocks, batch.warps), bool)
        if mask is not None:
            here = mask.reshape(batch.blocks, batch.warps, 32).any(2)
        block, warp = np.nonzero(here)
        self.seen[block, warp, warp] = self.epoch[block, warp]
        self.epoch[block, warp] += 1
