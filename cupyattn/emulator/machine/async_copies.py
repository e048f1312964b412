"""Copies from global to shared memory that go on while their thread does: ``cp.async``.

A copy reads its source at once. Its bytes reach shared memory as late as PTX allows: when the
thread that has started it waits for its group. A kernel that forgets the wait computes with what
was there before, even with all checks off. Until then `AsyncCopies` keeps the bytes in a second
buffer of the size of shared memory, with marks for those that are on their way.

The checks follow from that:

- A start is checked as a store is: bounds, alignment, and accesses of other threads that no barrier
  orders before it.
- On their way the bytes belong to the copy. Any access to them is a race, of whichever thread, and
  so is another copy to them that brings other values.
- At the wait the bytes become a store of the waiting thread: initialised, visible to itself, and to
  others after the next barrier.

Groups are counted for each thread: `commit` closes one, and a copy belongs to the group that is
open when it starts. A thread may end without a wait. Hardware completes its copies, so that is no
fault; but as no thread can know when, they never arrive here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from cupyattn.emulator.errors import KernelFault, SharedMemoryRaceError
from cupyattn.emulator.machine.block_memory import SharedMemory
from cupyattn.emulator.machine.global_memory import GlobalMemory
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask, over_lanes
from cupyattn.emulator.machine.memory import ELEMENT, SlicedBuffer
from cupyattn.emulator.machine.races import LoggedAccess, Marks


@dataclass(eq=False, slots=True)
class _Copy:
    """The copies that one instruction has started.

    Attributes
    ----------
    mask : array of bool or None
        The lanes whose copies are on their way; None: all.
    group : int or (blocks, threads) array
        How many groups each lane had committed before.
    index : array
        Places in shared memory in elements of `size` bytes: of every lane, or of those in `mask`.
    """

    site: int
    size: int
    mask: Mask
    group: Array | int
    index: Array


class AsyncCopies:
    """The copies of a batch that are on their way."""

    def __init__(self, lanes: Lanes, shared: SharedMemory, global_: GlobalMemory) -> None:
        self.lanes = lanes
        self.shared = shared
        self.global_ = global_
        self.tracker = tracker = shared.tracker
        self._watches = tracker is not None and tracker.races
        self._coming: SlicedBuffer | None = None  # what is on its way, where it will be
        self._marks: Marks | None = None  # of the bytes on their way, if races are checked
        self._pending: list[_Copy] = []
        self._committed: Array | int = 0  # groups of each lane, while any copy is on its way
        self._equal_ones = False  # whether two copies may bring the same bytes to one place

    # ------------------------------------------------------------------ what the kernel calls
    def start(
        self, target: Array, source: Array, size: int, count: Array | None, mask: Mask, site: int
    ) -> None:
        """Copy `size` bytes for each lane: the first `count` from `source`, the others zeros."""
        if mask is not None and not mask.any():
            return
        values = self._fetch(source, size, count, mask, site)
        index = self.shared.locate(target, size, mask, site, True)[0].index
        if mask is None:
            values, index = (
                over_lanes(values, self.lanes.shape),
                over_lanes(index, self.lanes.shape),
            )
        if self._coming is None:
            self._allocate()
        assert self._coming is not None
        elements = self._coming.views[size]
        copy = _Copy(site, size, mask, self._committed, index)
        if self._watches:
            self._watch(copy, values, elements)
        else:
            elements[index] = values
        self._pending.append(copy)

    def commit(self, mask: Mask) -> None:
        """Close a group of each lane (``cp.async.commit_group``); it may be empty."""
        self._committed = self._committed + (1 if mask is None else mask)

    def wait(self, most: int | None, mask: Mask) -> None:
        """Complete the copies of the lanes in `mask`.

        All but those of the last `most` groups and of the open one; None: all.
        """
        left = []
        part = False  # of a copy: lanes of the rest may bring the same bytes
        for copy in self._pending:
            done: Array | np.bool_ = np.True_
            if most is not None:
                done = np.asarray(copy.group) < self._committed - most
            rest = self._arrive(copy, done, mask)
            if rest is not None:
                left.append(rest)
                part |= rest is not copy
        self._pending = left
        if not left:
            self._committed = 0
            if self._watches and self.tracker is not None:
                self.tracker.copies = None
        if (part or self._equal_ones) and self._marks is not None:
            for copy in left:
                self._marks.set(self._access(copy))
            self._equal_ones &= bool(left)

    # ------------------------------------------------------------------ start
    def _allocate(self) -> None:
        storage = self.shared.storage
        self._coming = SlicedBuffer(storage.size, (self.lanes.blocks, 1))
        if self._watches and self.tracker is not None:
            granule = self.tracker.granule
            self._marks = Marks(self.lanes.blocks * (storage.stride // granule), granule)

    def _fetch(self, source: Array, size: int, count: Array | None, mask: Mask, site: int) -> Array:
        """Return the elements to copy: of the lanes in `mask` as a vector, as `gather` does."""
        if count is None:
            return self.global_.gather(source, size, mask, site)
        shape = self.lanes.shape
        counts = over_lanes(np.asarray(count), shape)
        here = np.ones(shape, bool) if mask is None else mask
        distinct = np.unique(counts[here])
        if distinct.size and int(distinct[-1]) > size:
            raise self.lanes.fault(
                KernelFault,
                f"cp.async of {size} bytes with a source of {distinct[-1]}; allowed: 0 to {size}",
                site,
                np.flatnonzero(here & (counts == distinct[-1])),
            )
        if distinct.size == 1 and int(distinct[0]) == size:
            return self.global_.gather(source, size, mask, site)
        self.global_.check_alignment(source, size, mask, site)
        values = np.zeros((*shape, size), np.uint8)
        for number in map(int, distinct):
            lanes = here & (counts == number)
            at = 0
            while at < number:  # the largest power of 2 that is left is aligned as the rest is
                part = 1 << (number - at).bit_length() - 1
                found = self.global_.gather(source + source.dtype.type(at), part, lanes, site)
                values[lanes, at : at + part] = found.view(np.uint8).reshape(-1, part)
                at += part
        whole = values.view(ELEMENT[size])[..., 0]
        return whole if mask is None else whole[mask]

    # ------------------------------------------------------------------ arrival
    def _arrive(self, copy: _Copy, done: Array | np.bool_, mask: Mask) -> _Copy | None:
        """Complete a copy for the lanes in `done` and `mask`; return what is still on its way."""
        if not done.any():
            return copy
        if mask is not None or not done.all():
            own = True if copy.mask is None else copy.mask
            arriving = np.broadcast_to(
                done & own & (True if mask is None else mask), self.lanes.shape
            )
            whole = np.ones(self.lanes.shape, bool) if copy.mask is None else copy.mask
            if not arriving.any():
                return copy
            staying = whole & ~arriving
            if staying.any():
                chosen = arriving if copy.mask is None else arriving[copy.mask]
                part = _Copy(copy.site, copy.size, arriving, copy.group, copy.index[chosen])
                self._land(part)
                return _Copy(copy.site, copy.size, staying, copy.group, copy.index[~chosen])
        self._land(copy)
        return None

    def _land(self, copy: _Copy) -> None:
        assert self._coming is not None
        values = self._coming.views[copy.size].take(copy.index)
        if self.tracker is not None:
            self.tracker.arrive(copy.index, copy.size, copy.mask)
        self.shared.views[copy.size][copy.index] = values
        if self._marks is not None:
            self._marks.clear(self._access(copy))

    # ------------------------------------------------------------------ checks
    def _access(self, copy: _Copy) -> LoggedAccess:
        assert self.tracker is not None
        return self.tracker.access(copy.index, copy.size, copy.mask, is_write=True)

    def _watch(self, copy: _Copy, values: np.ndarray, elements: np.ndarray) -> None:
        """Check a copy that starts, and mark its bytes."""
        assert self.tracker is not None
        assert self._marks is not None
        access = self._access(copy)
        self.check(access, copy.site, values)
        self.tracker.check_store(access, values, copy.site)
        elements[copy.index] = values
        self.tracker.after_write(elements, copy.index, values, copy.mask, copy.site)
        self._marks.set(access)
        self.tracker.copies = self

    def check(self, access: LoggedAccess, site: int, copied: np.ndarray | None = None) -> None:
        """Refuse an access to bytes that are on their way; a copy may bring the same ones."""
        assert self.tracker is not None
        assert self._marks is not None
        if not access.index.size or not self._marks.any(access):
            return
        index, threads = self.tracker.history.granules(access)
        bad = self._marks.bytes.take(index) != 0
        if copied is not None:
            assert self._coming is not None
            granule = self.tracker.granule
            bringing = np.ascontiguousarray(copied).reshape(-1).view(f"u{granule}")
            bad &= self._coming.views[granule].take(index) != bringing
            if not bad.any():
                self._equal_ones = True
                return
        verb = "reads" if not access.is_write else "writes" if copied is None else "copies to"
        first = int(np.argmax(bad))
        self._refuse(int(index[first]), int(threads.lane[first]), np.unique(threads.lane[bad]),
                     verb, site)  # fmt: skip

    def _refuse(
        self, granule: int, thread: int, lanes: np.ndarray, verb: str, site: int
    ) -> NoReturn:
        assert self.tracker is not None
        offset = granule % self.tracker.stride * self.tracker.granule
        copy, lane = self._copy_to(granule)
        warp, of_warp = divmod(lane % self.lanes.threads, 32)
        whose = (
            "the thread itself" if lane == thread else f"lane {of_warp} of warp {warp} of the block"
        )
        raise self.lanes.fault(
            SharedMemoryRaceError,
            f"shared-memory race: the thread {verb} byte {offset}"
            f"{self.shared.storage.nearest(offset)} while a copy to it is on its way, which "
            f"{whose} has started and not waited for (cp.async.wait_group), at "
            f"{self.lanes.describe(copy.site)}",
            site,
            lanes,
        )

    def _copy_to(self, granule: int) -> tuple[_Copy, int]:
        """Return a copy that is on its way to a granule, and its lane."""
        assert self.tracker is not None
        for copy in self._pending:
            found = np.flatnonzero(copy.index == granule // (copy.size // self.tracker.granule))
            if found.size:
                lane = found[0] if copy.mask is None else np.flatnonzero(copy.mask)[found[0]]
                return copy, int(lane)
        raise AssertionError("a mark without a copy")
