"""Loads and stores that all state spaces share.

A state space turns addresses into indices of NumPy arrays (`MemorySpace.locate`); everything else
is shared. Vectors (``.v2``, ``.v4``) move as one element of their whole size and are then split.

`SlicedBuffer` holds the bytes of shared, local and parameter memory: a slice per block or thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.emulator.checks import Checks
from cupyattn.emulator.errors import MisalignedAccessError
from cupyattn.emulator.machine.lanes import Array, Lanes, Mask, over_lanes

# The dtype that moves 1, 2, 4, 8 or 16 bytes as one element (complex128: only as 16 bytes).
ELEMENT = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class SlicedBuffer:
    """A buffer with a slice for each owner.

    Parameters
    ----------
    size : int
        Bytes that an owner has.
    owners : tuple of int
        The shape of what owns slices, to broadcast with the lanes.
    variables : sequence of (name, offset, size)
        What lies in a slice, for messages.

    Attributes
    ----------
    stride : int
        Bytes from one slice to the next.
    views : dict of int to array
        The buffer as elements of 1, 2, 4, 8 and 16 bytes.
    base : dict of int to array
        Where the slice of each owner begins, in such elements.
    """

    def __init__(
        self,
        size: int,
        owners: tuple[int, ...],
        variables: list[tuple[str, int, int]] | None = None,
    ) -> None:
        self.size = size
        self.variables = variables or []
        self.stride = -(-max(size, 16) // 16) * 16
        count = int(np.prod(owners))
        self.bytes = np.full(count * self.stride, 0xCD, np.uint8)
        self.views = {k: self.bytes.view(t) for k, t in ELEMENT.items()}
        owner = np.arange(count).reshape(owners)
        self.base = {k: owner * (self.stride // k) for k in ELEMENT}

    def nearest(self, offset: int) -> str:
        """Name the variable at `offset` or the last one before it, for messages."""
        found = [v for v in self.variables if v[1] <= max(offset, 0)]
        if not found:
            return ""
        name, start, size = max(found, key=lambda v: v[1])
        place = "in" if start <= offset < start + size else "after"
        return f" ({place} `{name}`, {size} bytes at {start})"


# Generic addresses of shared and local memory; everything else is global.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
WINDOW_BYTES = 1 << 32


class MemoryPiece(NamedTuple):
    """Where some of the lanes of an access go: `elements[index]`.

    `lanes` selects among the lanes of the access, None for all of them.
    """

    elements: np.ndarray
    index: Any  # an array; tuple.index is a method
    lanes: np.ndarray | None


def broadcast_active(value: Array, mask: Mask, shape: tuple[int, int]) -> Array:
    """Return the values of the lanes in `mask` as a vector, or `value` as it is without a mask."""
    if mask is None:
        return value
    return over_lanes(value, shape)[mask]


class MemorySpace:
    """Loads and stores on top of `locate`."""

    name = "memory"
    flushes_sums = False  # whether atomic sums of float32 become zeros where they are subnormal

    def __init__(self, lanes: Lanes, checks: Checks) -> None:
        self.lanes = lanes
        self.shape = lanes.shape
        self.checks = checks

    def locate(
        self, address: Array, size: int, mask: Mask, site: int, write: bool
    ) -> list[MemoryPiece]:
        """Translate addresses of accesses of `size` bytes, checking them.

        Without a mask the indices have any shape that broadcasts to the lanes; with one they are
        a vector over its lanes.
        """
        raise NotImplementedError

    def before_update(self, index: Array, size: int, mask: np.ndarray, site: int) -> None:
        """Check an atomic update of the lanes in `mask`."""

    def gather(self, address: Array, width: int, mask: Mask, site: int) -> Array:
        """Load one element of `width` bytes; with a mask the result is a vector over its lanes."""
        pieces = self.locate(address, width, mask, site, False)
        if len(pieces) == 1 and pieces[0].lanes is None:
            return pieces[0].elements.take(pieces[0].index)
        lanes = self.shape if mask is None else (int(np.count_nonzero(mask)),)
        values = np.zeros(lanes, ELEMENT[width])
        for elements, index, chosen in pieces:
            values[chosen] = elements.take(index)
        return values

    def load(self, address: Array, size: int, count: int, mask: Mask, site: int) -> Array:
        """Load `count` consecutive elements of `size` bytes: one array, or a tuple of them."""
        width = size * count
        values = self.gather(address, width, mask, site)
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
        self, address: Array, size: int, values: tuple[Array, ...], mask: Mask, site: int
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
        self, elements: np.ndarray, index: Array, values: Array, mask: Mask, site: int
    ) -> None:
        """Assign `values`; of equal indices the last wins."""
        elements[index] = values

    def check_alignment(self, address: Array, size: int, mask: Mask, site: int) -> None:
        """Refuse addresses of the lanes in `mask` that are no multiples of `size`."""
        if self.checks.alignment:
            self._check_alignment(broadcast_active(address, mask, self.shape), size, mask, site)

    def _check_alignment(self, offset: Array, size: int, mask: Mask, site: int) -> None:
        bitwise_or: Any = np.bitwise_or  # NumPy's stubs differ on axis=None from version to version
        every_bit = bitwise_or.reduce(offset, axis=None)
        if int(every_bit) & (size - 1):
            offset = np.asarray(offset)
            bad = (offset & offset.dtype.type(size - 1)) != 0
            value = int(offset[bad][0])
            raise self.lanes.fault(
                MisalignedAccessError,
                f"misaligned {size}-byte access to {self.name} memory at {value:#x}, "
                f"{value % size} bytes off a multiple of {size}",
                site,
                self.lanes.numbers(bad, mask),
            )
