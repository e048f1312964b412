"""The bytes behind shared, local and parameter memory: a slice per block or thread."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ELEMENT", "Storage"]

Array = Any

# The dtype that moves 1, 2, 4, 8 or 16 bytes as one element (complex128: only as 16 bytes).
ELEMENT = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Storage:
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
        place = "in" if start <= offset < start + size else "behind"
        return f" ({place} `{name}`, {size} bytes at {start})"
