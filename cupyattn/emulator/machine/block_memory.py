"""Shared, local and parameter memory: what a batch holds itself, a slice per block or thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupyattn.emulator.errors import OutOfBoundsError
from cupyattn.emulator.machine.memory import ELEMENT, MemorySpace, Piece, broadcast_active

if TYPE_CHECKING:
    from cupyattn.emulator.machine.batch import Batch

__all__ = ["LocalMemory", "ParameterMemory", "SharedMemory"]

Array = Any

# An element's size as a power of 2.
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


class _BlockMemory(MemorySpace):
    """Memory that the batch itself holds: a buffer with a slice per block or thread."""

    def __init__(self, batch: Batch, size: int, owners: tuple[int, ...]) -> None:
        super().__init__(batch)
        self.size = size
        self.stride = -(-max(size, 16) // 16) * 16
        count = int(np.prod(owners))
        self.bytes = np.full(count * self.stride, 0xCD, np.uint8)
        self.views = {k: self.bytes.view(t) for k, t in ELEMENT.items()}
        owner = np.arange(count).reshape(owners)
        self.base = {k: owner * (self.stride // k) for k in ELEMENT}

    def offsets(self, address: Array, size: int, mask: Array, site: int, write: bool) -> Array:
        """Check addresses, and return them (those of the mask) as int64."""
        offset = broadcast_active(address, mask, self.shape)
        if offset.size == 0:
            return offset.astype(np.int64)
        if self.checks.alignment and size > 1:
            self._check_alignment(offset, size, mask, site)
        if offset.max() > self.size - size and (
            self.checks.bounds or offset.max() > self.stride - size
        ):
            self._out_of_bounds(offset, size, mask, site, write)
        return offset.astype(np.int64)

    def _out_of_bounds(self, offset: Array, size: int, mask: Array, site: int, write: bool) -> None:
        signed = np.asarray(offset)
        signed = signed.view(f"i{signed.dtype.itemsize}")
        bad = (signed > self.size - size) | (signed < 0)
        lanes = self.batch.lanes(bad, mask)
        every = signed if mask is not None else np.broadcast_to(signed, self.shape)
        at = int(every[np.broadcast_to(bad, every.shape)][0])
        where = (
            f"{-at} bytes before its start"
            if at < 0
            else f"{at - self.size} bytes past its end"
            if at >= self.size
            else f"its last {at + size - self.size} bytes past the end"
        )
        raise self.batch.fault(
            OutOfBoundsError,
            f"out-of-bounds {size}-byte {'store to' if write else 'load from'} {self.name} memory "
            f"({self.size} bytes) at offset {at}: {where}{self.nearest(at)}",
            site,
            lanes,
        )

    def nearest(self, offset: int) -> str:
        """Name the variable at `offset` or the last one before it, for messages."""
        found = [v for v in self.variables() if v[1] <= max(offset, 0)]
        if not found:
            return ""
        name, start, size = max(found, key=lambda v: v[1])
        place = "in" if start <= offset < start + size else "behind"
        return f" ({place} `{name}`, {size} bytes at {start})"

    def variables(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, size) of what lies in this memory."""
        return []


class SharedMemory(_BlockMemory):
    """One slice per block; hands every access to the race tracker and to the report."""

    name = "shared"

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch, batch.launch.shared_bytes, (batch.blocks, 1))
        self.tracker = batch.tracker
        self.report = batch.report

    def variables(self) -> list[tuple[str, int, int]]:
        """Return (name, offset, size) of the shared variables."""
        return self.batch.launch.shared_variables

    def locate(self, address: Array, size: int, mask: Array, site: int, write: bool) -> list[Piece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        if self.report is not None:
            self.report.shared_access(site, address, size, mask, self.batch)
        base = self.base[size]
        if mask is not None:
            base = np.broadcast_to(base, self.shape)[mask]
        index = (offset >> _SHIFT[size]) + base
        if self.tracker is not None and not write:
            self.tracker.read(index, size, mask, site)
        return [Piece(self.views[size], index, None)]

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

    def __init__(self, batch: Batch) -> None:
        size = batch.program.local_bytes
        super().__init__(batch, size, batch.shape if size else (1, 1))

    def locate(self, address: Array, size: int, mask: Array, site: int, write: bool) -> list[Piece]:
        """Translate addresses; see `MemorySpace.locate`."""
        offset = self.offsets(address, size, mask, site, write)
        base = self.base[size]
        if mask is not None:
            base = np.broadcast_to(base, self.shape)[mask]
        return [Piece(self.views[size], (offset >> _SHIFT[size]) + base, None)]


class ParameterMemory(_BlockMemory):
    """The kernel's parameters: one buffer for all."""

    name = "parameter"

    def __init__(self, batch: Batch) -> None:
        data = batch.launch.parameter_bytes
        super().__init__(batch, len(data), (1, 1))
        self.bytes[: len(data)] = np.frombuffer(data, np.uint8)

    def constant(self, offset: int, size: int) -> Array:
        """Return the element at a fixed offset, a 0-d array."""
        return np.asarray(self.bytes[offset : offset + size].view(ELEMENT[size])[0])

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
