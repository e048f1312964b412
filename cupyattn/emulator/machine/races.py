"""Shared memory: reads of what was never written, and races.

Two accesses of different threads race if one is a write and no barrier orders them. `clocks` knows
what barriers order, `history` who has accessed what.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import SharedMemoryRaceError, UninitializedReadError
from cupyattn.emulator.machine.clocks import Clocks
from cupyattn.emulator.machine.history import (
    COLLECTIVE,
    MANY,
    WHO,
    Access,
    History,
    Marks,
    Threads,
)
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.storage import Storage
from cupyattn.emulator.program import Program

__all__ = ["SharedMemoryTracker"]

Array = Any


class SharedMemoryTracker:
    """Checks every access to a batch's shared memory."""

    def __init__(self, lanes: Lanes, checks: Checks, storage: Storage) -> None:
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

    @staticmethod
    def bytes_per_block(program: Program, shared_bytes: int, threads: int) -> int:
        """Return the size of the records for one block."""
        units = threads // (1 if program.partial_warp_barriers else 32)
        return 4 * (-(-shared_bytes // program.shared_granule) * (units + 3) + units * units)

    # ------------------------------------------------------------------ accesses
    def _access(
        self,
        index: Array,
        size: int,
        mask: Array,
        *,
        lanes: np.ndarray | None = None,
        is_write: bool = False,
        atomic: bool = False,
    ) -> Access:
        epoch = self.clocks.epoch
        return Access(index, size // self.granule, mask, lanes, epoch, is_write, atomic)

    def read(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and note loads."""
        self._read(self._access(index, size, mask), site)

    def read_rows(self, index: np.ndarray, lanes: np.ndarray, mask: Array, site: int) -> None:
        """Check and note the 16-byte rows that whole warps load at once (``ldmatrix``)."""
        self._read(self._access(index, 16, mask, lanes=lanes), site)

    def _read(self, access: Access, site: int) -> None:
        if not access.index.size:
            return
        self._check_written(access, site)
        if self.races:
            if self.history.meets_write(access):
                self.history.settle()
                self._check_read(access, site)
            self.history.note(access)

    def write(self, index: Array, values: np.ndarray, mask: Array, site: int) -> None:
        """Check and note stores, before they happen."""
        self._write(self._access(index, values.itemsize, mask, is_write=True), values, site)

    def atomic(self, index: Array, size: int, mask: Array, site: int) -> None:
        """Check and note atomic updates: they race with loads and stores, not with each other."""
        access = self._access(index, size, mask, is_write=True, atomic=True)
        if index.size:
            self._check_written(access, site)
        self._write(access, None, site)

    def _write(self, access: Access, values: np.ndarray | None, site: int) -> None:
        if not access.index.size:
            return
        if self.races:
            if self.history.meets_read(access) or self.history.meets_write(access):
                self.history.settle()
                self._check_write(access, values, site)
            self.history.note(access)
        self.written.set(access)

    def after_write(
        self, elements: np.ndarray, index: Array, values: np.ndarray, mask: Array, site: int
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
    def _check_written(self, access: Access, site: int) -> None:
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

    def _after_writes(
        self, index: np.ndarray, unit: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which granules hold a write not yet visible, its record and its unit."""
        writer = self.history.writer.take(index)
        writer_unit = self.history.writer_unit.take(index)
        visible = self.clocks.seen.reshape(-1).take(unit * self.clocks.units + writer_unit)
        return (writer >> 6) > visible, writer, writer_unit

    def _check_read(self, access: Access, site: int) -> None:
        index, threads = self.history.granules(access, whole_warps=True)
        bad, writer, writer_unit = self._after_writes(index, threads.unit)
        if access.lanes is None or self.clocks.unit == 1:  # a thread sees its own write
            bad &= (writer_unit != threads.own) | ((writer & WHO) != threads.who)
        if bad.any():
            self._race(index, threads, site, "reads", bad, writer_unit, writer, "written")

    def _check_write(self, access: Access, values: np.ndarray | None, site: int) -> None:
        index, threads = self.history.granules(access)
        _, unit, own, who = threads
        bad, writer, writer_unit = self._after_writes(index, unit)
        if bad.any():
            bad &= (writer_unit != own) | ((writer & WHO) != who)
            if values is None:
                bad &= ~self.history.by_atomic.take(index)
            else:  # equal writes do not race with each other
                granules = np.ascontiguousarray(values).reshape(-1).view(f"u{self.granule}")
                bad &= self.storage.views[self.granule].take(index) != granules
            if bad.any():
                self._race(index, threads, site, "writes", bad, writer_unit, writer, "written")
        units = self.clocks.units
        readers = self.history.readers.take(index, axis=0)
        unseen: Any = (readers >> 6) > self.clocks.seen.reshape(-1, units).take(unit, axis=0)
        if unseen.any():
            row = np.arange(index.size)
            unseen[row, own] &= (readers[row, own] & WHO) != who
            # what the warp read all together, it has read before any of its lanes goes on
            warp_of_unit = np.arange(units) * self.clocks.unit // 32
            same_warp = warp_of_unit == warp_of_unit.take(own)[:, None]
            unseen &= ~(same_warp & ((readers & WHO) == COLLECTIVE))
            bad = unseen.any(1)
            if bad.any():
                reader_unit = unseen.argmax(1)
                reader = readers[row, reader_unit]
                self._race(index, threads, site, "writes", bad, reader_unit, reader, "read")

    def _race(
        self,
        index: np.ndarray,
        threads: Threads,
        site: int,
        verb: str,
        bad: np.ndarray,
        other_unit: np.ndarray,
        other: np.ndarray,
        participle: str,
    ) -> None:
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
