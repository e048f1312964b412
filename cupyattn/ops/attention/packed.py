"""Sequences that stand one behind the other in one array: their checks, and what a call asks for.

Kernels and checks see packed rows (total, H, D) as those of a batch whose sequences are all as long
as the longest and begin at the first row, (B, longest, H, D) with a batch stride of 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.ops.attention.problem import MAX_LENGTH, AttentionProblem
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.checks import (
    INTEGERS,
    require_dtype,
    require_rank,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.value_checks import on_host


def require_bounds(name: str, bounds: Layout, of: str = "q") -> int:
    """Check the layout of cu_seqlens, which bounds the sequences in `of`; return their number."""
    require_dtype(name, bounds, INTEGERS)
    require_rank(name, bounds, "B+1")
    require_whole_item_strides(name, bounds)
    if bounds.shape[0] == 0:
        raise error(
            ValueError,
            f"{name} has no items",
            f"it has B + 1: where the rows of each sequence begin in {of}, and where the last "
            "one's end",
            "pass numpy.array([0], 'int32') for no sequence",
        )
    return bounds.shape[0] - 1


def checked_longest(name: str, given: Any, rows: Layout) -> int:
    """Return the most rows that a sequence has, as the caller says.

    Beyond what kernels count to it is no more than there are rows.
    """
    most = integer(name, given)
    if most < 0:
        raise error(
            ValueError,
            f"{name} = {most}",
            "it is the most rows of a sequence, 0 or more",
            "pass that number, or a larger one",
        )
    return min(most, max(MAX_LENGTH, rows.shape[0]))


def counts_of(
    name: str, bounds: Array, total: int, longest: int, of: str = "q", *, whole: bool = True
) -> np.ndarray:
    """Return how many rows each sequence has, int64; a GPU is waited for.

    The first sequence begins at row 0, unless they need not be the `whole` array.

    Raises
    ------
    ValueError
        Unless cu_seqlens fits its arrays and max_seqlen.
    """
    items = on_host(bounds).astype(np.int64)
    counts = np.diff(items)
    first_row = "0" if whole else "0 or more"
    if items[0] < 0 or (whole and items[0]) or items[-1] > total or (counts < 0).any():
        raise error(
            ValueError,
            f"{name} = {shown(items.tolist())}",
            f"it begins with {first_row}, never falls, and ends at {total} at the most: the rows "
            f"of {of}",
            "pass numpy.cumsum of the lengths, with a 0 in front",
        )
    if (counts > longest).any():
        at = int(np.argmax(counts > longest))
        most = name.replace("cu_seqlens", "max_seqlen")
        raise error(
            ValueError,
            f"sequence {at} of {name} has {counts[at]} rows",
            f"each has at most {most} = {longest}",
            f"pass the largest number as {most}",
        )
    return counts


def unpacked(name: str, layout: Layout, batch: int, longest: int) -> Layout:
    """Return packed rows, or sums of rows (H, total), as those of a batch.

    Examples
    --------
    >>> unpacked("lse", Layout((4, 9), (36, 4), np.dtype(np.float32)), 2, 6)
    Layout(shape=(2, 4, 6), strides=(0, 36, 4), dtype=dtype('float32'))
    """
    shape, strides, dtype = layout
    if 0 in shape:  # whose strides say nothing
        strides = contiguous(shape, dtype).strides
    if name in ("lse", "dlse"):
        return Layout((batch, shape[0], longest), (0, *strides), dtype)
    return Layout((batch, longest, *shape[1:]), (0, *strides), dtype)


@dataclass(frozen=True, eq=False)
class PackedProblem(AttentionProblem):
    """A valid call of attention whose sequences are packed.

    Sq and Sk are those of the longest sequence; `layouts` has packed arrays as those of a batch.
    """

    packed: dict[str, Layout]
    """The arrays as the caller gave them."""

    @property
    def total_q(self) -> int:
        """Rows of q."""
        return self.packed["q"].shape[0]

    @property
    def total_k(self) -> int:
        """Rows of k and v."""
        return self.packed["k"].shape[0]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(total_q, H, Dv)."""
        return (self.total_q, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(H, total_q)."""
        return (self.heads, self.total_q)

    def query_tiles(self, rows: int) -> int:
        """Return how many tiles of query rows sequences of any lengths could have together."""
        return _most_tiles(self.batch, self.sq, self.total_q, rows)

    def key_tiles(self, keys: int) -> int:
        """Return the same of keys."""
        return _most_tiles(self.batch, self.sk, self.total_k, keys)

    @property
    def first_position(self) -> int | None:
        """Where query 0 of each sequence stands; None where that differs."""
        return None if "q_offset" in self.layouts else self.q_offset

    def given(self, name: str) -> Layout | None:
        """Return how an array of the call lies, as the caller gave it."""
        return self.packed.get(name)

    def placed(self, name: str, layout: Layout) -> Layout:
        """Return an array's layout as `layouts` has it."""
        if name in ("q", "out", "lse", "dq"):
            return unpacked(name, layout, self.batch, self.sq)
        keys = name in ("k", "dk", "dv")
        return unpacked(name, layout, self.batch, self.sk) if keys else layout

    def moved(self, arrays: Mapping[str, Layout], without: Collection[str] = ()) -> PackedProblem:
        """Return the call with `arrays` elsewhere, and `without` some others."""
        left = super().moved(arrays, without)
        return PackedProblem(**{**vars(left), "packed": {**self.packed, **arrays}})


def _most_tiles(batch: int, longest: int, total: int, rows: int) -> int:
    return min(batch * -(-longest // rows), (total + batch * (rows - 1)) // rows)
