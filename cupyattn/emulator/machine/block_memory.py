"""Shared, local and parameter memory of a batch, and accesses without a state space.

A batch holds a slice per block or thread. ``ld``, ``st`` and ``atom`` by generic address find the
space of each address.
"""

from __future__ import annotations

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import OutOfBoundsError
from cupyattn.emulator.machine.atomics import AtomicOperations
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask
from cupyattn.emulator.machine.memory import (
    ELEMENT,
    LOCAL_WINDOW,
    SHARED_WINDOW,
    WINDOW_BYTES,
    MemoryPiece,
    MemorySpace,
    SlicedBuffer,
    broadcast_active,
)
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.report import Report

# An element's size as a power of 2.
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


class _BlockMemory(MemorySpace):
    """Memory that the batch itself holds."""

    def __init__(self, lanes: Lanes, checks: Checks, storage: SlicedBuffer) -> None:
        super().__init__(lanes, checks)
        self.storage = storage
        self.size = storage.size
        self.views = storage.views
        self._base = storage.base
        self._base_of_lanes = {
            size: np.broadcast_to(base, lanes.shape) for size, base in storage.base.items()
        }

    def _elements(self, offset: Array, size: int, mask: Mask) -> Array:
        """Return the indices in `views` of what `offsets` returned."""
        base = self._base[size] if mask is None else self._base_of_lanes[size][mask]
        return (offset >> _SHIFT[size]).astype(np.int64) + base

    def offsets(self, address: Array, size: int, mask: Mask, site: int, write: bool) -> Array:
        """Check addresses, and return them (those of the mask)."""
        offset = broadcast_active(address, mask, self.shape)
        if offset.size == 0:
            return offset
        if self.checks.alignment and size > 1:
            self._check_alignment(offset, size, mask, site)
        if offset.max() > self.size - size and (
            self.checks.bounds or offset.max() > self.storage.stride - size
        ):
            self._out_of_bounds(offset, size, mask, site, write)
        return offset

    def _out_of_bounds(self, offset: Array, size: int, mask: Mask, site: int, write: bool) -> None:
        signed = np.asarray(offset)
        signed = signed.view(f"i{signed.dtype.itemsize}")
        bad = (signed > self.size - size) | (signed < 0)
        lanes = self.lanes.numbers(bad, mask)
        every = signed if mask is not None else np.broadcast_to(signed, self.shape)
        at = int(every[np.broadcast_to(bad, every.shape)][0])
        where = (
            f"{-at} bytes before its start"
            if at < 0
            else f"{at - self.size} bytes past its end"
            if at >= self.size
            else f"its last {at + size - self.size} bytes past the end"
        )
        raise self.lanes.fault(
            OutOfBoundsError,
            f"out-of-bounds {size}-byte {'store to' if write else 'load from'} {self.name} memory "
            f"({self.size} bytes) at offset {at}: {where}{self.storage.nearest(at)}",
            site,
            lanes,
        )


class SharedMemory(_BlockMemory):
    """One slice per block; hands every access to the race tracker and to the report."""

    name = "shared"

    def __init__(
        self,
        lanes: Lanes,
        checks: Checks,
        storage: SlicedBuffer,
        tracker: SharedMemoryTracker | None,
        report: Report | None,
    ) -> None:
        super().__init__(lanes, checks, storage)
        self._start = lanes.program.layout.shared_start
        self.tracker = tracker
        self.report = report

    def locate(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses; see `MemorySpace.locate`."""
        if self._start:
            address = address - address.dtype.type(self._start)
        offset = self.offsets(address, size, mask, site, write)
        if self.report is not None:
            self.report.shared_access(site, address, size, mask, self.lanes)
        index = self._elements(offset, size, mask)
        if self.tracker is not None and not write:
            self.tracker.read(index, size, mask, site)
        return [MemoryPiece(self.views[size], index, None)]

    def before_update(self, index: Array, size: int, mask: np.ndarray, site: int) -> None:
        """Check an atomic update of the lanes in `mask`."""
        if self.tracker is not None:
            self.tracker.atomic(index, size, mask, site)

    def write(
        self, elements: np.ndarray, index: Array, values: Array, mask: Mask, site: int
    ) -> None:
        """Assign `values`, telling the race tracker before and after."""
        if self.tracker is not None:
            self.tracker.write(index, values, mask, site)
        elements[index] = values
        if self.tracker is not None:
            self.tracker.after_write(elements, index, values, mask, site)


class LocalMemory(_BlockMemory):
    """One slice per thread: stack frames of dynamically indexed arrays, arguments of calls."""

    name = "local"

    def __init__(self, lanes: Lanes, checks: Checks, size: int) -> None:
        super().__init__(lanes, checks, SlicedBuffer(size, lanes.shape if size else (1, 1)))

    def locate(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        return [MemoryPiece(self.views[size], self._elements(offset, size, mask), None)]


class ParameterMemory(_BlockMemory):
    """The kernel's parameters: one buffer for all."""

    name = "parameter"

    def __init__(self, lanes: Lanes, checks: Checks, data: bytes) -> None:
        super().__init__(lanes, checks, SlicedBuffer(len(data), (1, 1)))
        self.storage.bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def constant(self, offset: int, size: int) -> Array:
        """Return the element at a fixed offset, a 0-d array."""
        return np.asarray(self.storage.bytes[offset : offset + size].view(ELEMENT[size])[0])

    def load(self, address: Array, size: int, count: int, mask: Mask, site: int) -> Array:
        """Load as `MemorySpace.load`: mostly one element at an address that all lanes share."""
        if count == 1 and np.ndim(address) == 0:
            offset = int(address)
            if offset % size == 0 and offset <= self.size - size:
                return self.constant(offset, size)
        return super().load(address, size, count, mask, site)

    def locate(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        return [MemoryPiece(self.views[size], (offset >> _SHIFT[size]).astype(np.int64), None)]


class GenericMemory:
    """Accesses without a state space: each lane goes where its address points."""

    def __init__(
        self,
        lanes: Lanes,
        shared: MemorySpace,
        local: MemorySpace,
        global_: MemorySpace,
        atomics: AtomicOperations,
    ) -> None:
        self.shape = lanes.shape
        self.shared = shared
        self.local = local
        self.global_ = global_
        self.atomics = atomics

    def _spaces(self, address: Array, mask: Mask) -> list[tuple[MemorySpace, Array, Mask]]:
        """Return (space, address in it, mask) for every space that a running lane addresses."""
        address = np.asarray(address)
        shared = (address - np.uint64(SHARED_WINDOW)) < np.uint64(WINDOW_BYTES)
        local = (address - np.uint64(LOCAL_WINDOW)) < np.uint64(WINDOW_BYTES)
        low = address & np.uint64(WINDOW_BYTES - 1)
        found: list[tuple[MemorySpace, Array, Mask]] = []
        for space, here, inside in (
            (self.shared, shared, low),
            (self.local, local, low),
            (self.global_, ~(shared | local), address),
        ):
            running = here if mask is None else here & mask
            if not running.any():
                continue
            if running.all():
                return [(space, inside, mask)]
            if mask is not None and np.array_equal(np.broadcast_to(running, mask.shape), mask):
                return [(space, inside, mask)]
            found.append((space, inside, np.broadcast_to(running, self.shape)))
        return found

    def load(self, address: Array, size: int, count: int, mask: Mask, site: int) -> Array:
        """Load as `MemorySpace.load`."""
        spaces = self._spaces(address, mask)
        if len(spaces) == 1:
            space, inside, lanes = spaces[0]
            return space.load(inside, size, count, lanes, site)
        shape = self.shape if count == 1 else (count, *self.shape)
        values = np.zeros(shape, ELEMENT[size])
        for space, inside, lanes in spaces:
            part = space.load(inside, size, count, lanes, site)
            np.copyto(values, part, where=lanes)
        return values

    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Mask, site: int
    ) -> None:
        """Store as `MemorySpace.store`."""
        for space, inside, lanes in self._spaces(address, mask):
            space.store(inside, size, values, lanes, site)

    def atomic(
        self,
        operation: str,
        kind: str,
        address: Array,
        values: tuple[Array, ...],
        mask: Mask,
        site: int,
        wants_old: bool,
    ) -> Array | None:
        """Update atomically as `AtomicOperations.update`."""
        old: Array | None = None
        for space, inside, lanes in self._spaces(address, mask):
            part = self.atomics.update(
                space, operation, kind, inside, values, lanes, site, wants_old
            )
            if part is not None:
                old = part if old is None or lanes is None else np.where(lanes, part, old)
        return old
