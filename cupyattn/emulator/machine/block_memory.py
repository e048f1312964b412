"""Shared, local and parameter memory: what a batch holds itself, a slice per block or thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import OutOfBoundsError
from cupyattn.emulator.machine.lanes import Lanes
from cupyattn.emulator.machine.memory import MemorySpace, Piece, broadcast_active
from cupyattn.emulator.machine.races import SharedMemoryTracker
from cupyattn.emulator.machine.storage import ELEMENT, Storage
from cupyattn.emulator.report import Report

__all__ = ["LocalMemory", "ParameterMemory", "SharedMemory"]

Array = Any

# An element's size as a power of 2.
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


class _BlockMemory(MemorySpace):
    """Memory that the batch itself holds."""

    def __init__(self, lanes: Lanes, checks: Checks, storage: Storage) -> None:
        super().__init__(lanes, checks)
        self.storage = storage
        self.size = storage.size
        self.views = storage.views
        self._base = storage.base
        self._base_of_lanes = {
            size: np.broadcast_to(base, lanes.shape) for size, base in storage.base.items()
        }

    def _elements(self, offset: Array, size: int, mask: Array) -> Array:
        """Return the indices in `views` of what `offsets` returned."""
        base = self._base[size] if mask is None else self._base_of_lanes[size][mask]
        return (offset >> _SHIFT[size]) + base

    def offsets(self, address: Array, size: int, mask: Array, site: int, write: bool) -> Array:
        """Check addresses, and return them (those of the mask) as int64."""
        offset = broadcast_active(address, mask, self.shape)
        if offset.size == 0:
            return offset.astype(np.int64)
        if self.checks.alignment and size > 1:
            self._check_alignment(offset, size, mask, site)
        if offset.max() > self.size - size and (
            self.checks.bounds or offset.max() > self.storage.stride - size
        ):
            self._out_of_bounds(offset, size, mask, site, write)
        return offset.astype(np.int64)

    def _out_of_bounds(self, offset: Array, size: int, mask: Array, site: int, write: bool) -> None:
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
        storage: Storage,
        tracker: SharedMemoryTracker | None,
        report: Report | None,
    ) -> None:
        super().__init__(lanes, checks, storage)
        self.tracker = tracker
        self.report = report

    def locate(self, address: Array, size: int, mask: Array, site: int, write: bool) -> list[Piece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        if self.report is not None:
            self.report.shared_access(site, address, size, mask, self.lanes)
        index = self._elements(offset, size, mask)
        if self.tracker is not None and not write:
            self.tracker.read(index, size, mask, site)
        return [Piece(self.views[size], index, None)]

    def before_update(self, index: Array, size: int, mask: np.ndarray, site: int) -> None:
        """Check an atomic update of the lanes in `mask`."""
        if self.tracker is not None:
            self.tracker.atomic(index, size, mask, site)

    def write(
        self, elements: np.ndarray, index: Array, values: Array, mask: Array, site: int
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
        super().__init__(lanes, checks, Storage(size, lanes.shape if size else (1, 1)))

    def locate(self, address: Array, size: int, mask: Array, site: int, write: bool) -> list[Piece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        return [Piece(self.views[size], self._elements(offset, size, mask), None)]


class ParameterMemory(_BlockMemory):
    """The kernel's parameters: one buffer for all."""

    name = "parameter"

    def __init__(self, lanes: Lanes, checks: Checks, data: bytes) -> None:
        super().__init__(lanes, checks, Storage(len(data), (1, 1)))
        self.storage.bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def constant(self, offset: int, size: int) -> Array:
        """Return the element at a fixed offset, a 0-d array."""
        return np.asarray(self.storage.bytes[offset : offset + size].view(ELEMENT[size])[0])

    def load(self, address: Array, size: int, count: int, mask: Array, site: int) -> Array:
        """Load as `MemorySpace.load`: mostly one element at an address that all lanes share."""
        if count == 1 and np.ndim(address) == 0:
            offset = int(address)
            if offset % size == 0 and offset <= self.size - size:
                return self.constant(offset, size)
        return super().load(address, size, count, mask, site)

    def locate(self, address: Array, size: int, mask: Array, site: int, write: bool) -> list[Piece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        return [Piece(self.views[size], offset >> _SHIFT[size], None)]
