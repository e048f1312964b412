"""Loads and stores: what the state spaces have in common, and shared, local and param memory.

A state space turns addresses into indices of NumPy arrays (`MemorySpace.locate`); everything else
is shared. Vectors (``.v2``, ``.v4``) move as one element of their whole size and are then split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyattn.emulator.errors import MisalignedAccessError, OutOfBoundsError
from cupyattn.emulator.machine.lanes import over_lanes

if TYPE_CHECKING:
    from cupyattn.emulator.machine.batch import Batch

__all__ = [
    "ELEMENT",
    "LOCAL_WINDOW",
    "SHARED_WINDOW",
    "WINDOW_BYTES",
    "GenericMemory",
    "LocalMemory",
    "MemorySpace",
    "ParameterMemory",
    "Piece",
    "SharedMemory",
    "broadcast_active",
]

Array = Any

# The dtype that moves 1, 2, 4, 8 or 16 bytes as one element (complex128: only as 16 bytes).
ELEMENT = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}

# Generic addresses of shared and local memory; everything else is global.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
WINDOW_BYTES = 1 << 32


class Piece(NamedTuple):
    """Where some of the lanes of an access go: `elements[index]`.

    `lanes` selects among the lanes of the access, None for all of them.
    """

    elements: np.ndarray
    index: Array
    lanes: np.ndarray | None


def broadcast_active(value: Array, mask: np.ndarray | None, shape: tuple[int, int]) -> Array:
    """Return the values of the lanes in `mask` as a vector, or `value` as it is without a mask."""
    if mask is None:
        return value
    return over_lanes(value, shape)[mask]


class MemorySpace:
    """Loads and stores on top of `locate`."""

    name = "memory"

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shape = batch.shape
        self.checks = batch.checks

    def locate(
        self, address: Array, size: int, mask: np.ndarray | None, site: int, write: bool
    ) -> list[Piece]:
        """Translate addresses of accesses of `size` bytes, checking them.

        Without a mask the indices have any shape that broadcasts to the lanes; with one they are
        a vector over its lanes.
        """
        raise NotImplementedError

    def load(self, address: Array, size: int, count: int, mask: Array, site: int) -> Array:
        """Load `count` consecutive elements of `size` bytes: one array, or a tuple of them."""
        width = size * count
        pieces = self.locate(address, width, mask, site, False)
        if len(pieces) == 1 and pieces[0].lanes is None:
            values = pieces[0].elements.take(pieces[0].index)
        else:
            lanes = self.shape if mask is None else (int(np.count_nonzero(mask)),)
            values = np.zeros(lanes, ELEMENT[width])
            for elements, index, chosen in pieces:
                values[chosen] = elements.take(index)
        if mask is not None:
            every = np.zeros(self.shape, ELEMENT[width])
            every[mask] = values
            values = every
        if count == 1:
            return values
        shape = values.shape
        parts = np.ascontiguousarray(values.reshape(-1, 1).view(ELEMENT[size]).T)
        return parts.reshape(count, *shape)

    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Array, site: int
    ) -> None:
        """Store consecutive elements of `size` bytes; of lanes with one address the last wins."""
        width = size * len(values)
        pieces = self.locate(address, width, mask, site, True)
        if len(values) == 1:
            packed = over_lanes(values[0], self.shape)
        else:
            parts = np.empty((*self.shape, len(values)), ELEMENT[size])
            for i, value in enumerate(values):
                parts[..., i] = value
            packed = parts.reshape(*self.shape[:-1], -1).view(ELEMENT[width])
        if mask is not None:
            packed = packed[mask]
        for elements, index, chosen in pieces:
            if chosen is None:
                target = index if mask is not None else over_lanes(index, self.shape)
                self.write(elements, target, packed, mask, site)
            else:
                self.write(elements, index, packed[chosen], mask, site)

    def write(
        self, elements: np.ndarray, index: Array, values: Array, mask: Array, site: int
    ) -> None:
        """Assign `values`; of equal indices the last wins."""
        elements[index] = values

    def _check_alignment(self, offset: Array, size: int, mask: Array, site: int) -> None:
        bitwise_or: Any = np.bitwise_or  # NumPy's stubs differ on axis=None from version to version
        every_bit = bitwise_or.reduce(offset, axis=None)
        if int(every_bit) & (size - 1):
            offset = np.asarray(offset)
            bad = (offset & offset.dtype.type(size - 1)) != 0
            value = int(offset[bad][0])
            raise self.batch.fault(
                MisalignedAccessError,
                f"misaligned {size}-byte access to {self.name} memory at {value:#x}, "
                f"{value % size} bytes off a multiple of {size}",
                site,
                self.batch.lanes(bad, mask),
            )


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


class GenericMemory:
    """Accesses without a state space: each lane goes where its address points."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def _spaces(self, address: Array, mask: Array) -> list[tuple[MemorySpace, Array, Array]]:
        """Return (space, address in it, mask) for every space that a running lane addresses."""
        batch = self.batch
        address = np.asarray(address)
        shared = (address - np.uint64(SHARED_WINDOW)) < np.uint64(WINDOW_BYTES)
        local = (address - np.uint64(LOCAL_WINDOW)) < np.uint64(WINDOW_BYTES)
        low = address & np.uint64(WINDOW_BYTES - 1)
        found: list[tuple[MemorySpace, Array, Array]] = []
        for space, here, inside in (
            (batch.shared, shared, low),
            (batch.local, local, low),
            (batch.global_, ~(shared | local), address),
        ):
            running = here if mask is None else here & mask
            if not running.any():
                continue
            if running.all():
                return [(space, inside, mask)]
            if mask is not None and np.array_equal(np.broadcast_to(running, mask.shape), mask):
                return [(space, inside, mask)]
            found.append((space, inside, np.broadcast_to(running, batch.shape)))
        return found

    def load(self, address: Array, size: int, count: int, mask: Array, site: int) -> Array:
        """Load as `MemorySpace.load`."""
        spaces = self._spaces(address, mask)
        if len(spaces) == 1:
            space, inside, lanes = spaces[0]
            return space.load(inside, size, count, lanes, site)
        shape = self.batch.shape if count == 1 else (count, *self.batch.shape)
        values = np.zeros(shape, ELEMENT[size])
        for space, inside, lanes in spaces:
            part = space.load(inside, size, count, lanes, site)
            np.copyto(values, part, where=lanes)
        return values

    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Array, site: int
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
        mask: Array,
        site: int,
        wants_old: bool,
    ) -> Array:
        """Update atomically as `AtomicOperations.update`."""
        old: Array = None
        for space, inside, lanes in self._spaces(address, mask):
            part = self.batch.atomics.update(
                space, operation, kind, inside, values, lanes, site, wants_old
            )
            if wants_old:
                old = part if old is None else np.where(lanes, part, old)
        return old
