"""What a call of attention asks for: shapes and options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS, Modifiers
from cupyattn.ops.attention.modifiers import UserFunction, modifiers_of, strides_of
from cupyattn.ops.attention.options import ALL_OPTIONS, TEACHING_OPTIONS
from cupyattn.runtime.arrays import Array, Layout, contiguous
from cupyattn.runtime.by_name import Overlaps
from cupyattn.runtime.checks import (
    INTEGERS,
    fixes_of_results,
    require_dtype,
    require_rank,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.numbers import integer
from cupyattn.runtime.plan import Output
from cupyattn.runtime.value_checks import on_host

LSE_DTYPE = np.dtype(np.float32)
MAX_LENGTH = 2**30 - 2**10  # a row of the last tile stays below kFar (masks.cuh)


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """A valid call of attention; letters as in the public API.

    Two calls of one description share one object, so it stands for the description in caches.
    """

    batch: int
    sq: int
    sk: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    layouts: dict[str, Layout]
    starts: dict[str, int]
    """By how many bytes each array misses a vector's alignment."""
    softmax_scale: float
    q_offset: int | None
    """Where `layouts` has no q_offset array; None for the last query at the last key in use."""
    window: tuple[int | None, int | None]
    """Keys to the left and right that a query sees, causality included; None is unbounded."""
    softcap: float | None
    dropout_p: float
    interleaved: bool
    """Whether rotary pairs neighbouring features."""
    functions: dict[str, UserFunction | None]
    """score_mod and mask_mod."""
    implementation: str
    overlaps: Overlaps

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(B, Sq, H, Dv)."""
        return (self.batch, self.sq, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, H, Sq)."""
        return (self.batch, self.heads, self.sq)

    def query_tiles(self, rows: int) -> int:
        """Return how many tiles of query rows the sequences have together, of one head."""
        return self.batch * -(-self.sq // rows)

    def key_tiles(self, keys: int) -> int:
        """Return the same of keys."""
        return self.batch * -(-self.sk // keys)

    def given(self, name: str) -> Layout | None:
        """Return how an array of the call lies, as the caller gave it."""
        return self.layouts.get(name)

    def placed(self, name: str, layout: Layout) -> Layout:
        """Return the layout of an array of that name as kernels take it."""
        return layout

    def moved(
        self, arrays: Mapping[str, Layout], without: Collection[str] = ()
    ) -> AttentionProblem:
        """Return the call with `arrays` elsewhere, which begin where vectors do.

        It is `without` some of its other arrays.
        """
        places = {name: self.placed(name, layout) for name, layout in arrays.items()}
        others = {name: x for name, x in self.layouts.items() if name not in without}
        return replace(
            self,
            layouts={**others, **places},
            starts={**self.starts, **dict.fromkeys(arrays, 0)},
        )

    @property
    def ends_with_keys_in_use(self) -> bool:
        """Whether seqused_k decides where queries stand."""
        given = self.q_offset is not None or "q_offset" in self.layouts
        return "seqused_k" in self.layouts and not given

    @property
    def first_position(self) -> int | None:
        """Where query 0 stands; None where an array says it."""
        if "q_offset" in self.layouts or self.ends_with_keys_in_use:
            return None
        return self.sk - self.sq if self.q_offset is None else self.q_offset

    @property
    def lse_dtype(self) -> np.dtype:
        """Of lse and its gradient: float32, for float64 arrays float64."""
        return self.dtype if self.dtype == np.float64 else LSE_DTYPE

    @property
    def refusable_options(self) -> frozenset[str]:
        """The options of the call that some kernels do not have."""
        used = {"rotary" if name == "cos" else name for name in self.layouts}
        used |= {"softcap"} if self.softcap is not None else set()
        used |= {"dropout_p"} if self.dropout_p else set()
        used |= {name for name, function in self.functions.items() if function is not None}
        used |= {"window_size"} if self.window not in ((None, None), (None, 0)) else set()
        used |= {"q_offset"} if self.q_offset is not None else set()
        return frozenset(used & (ALL_OPTIONS - TEACHING_OPTIONS))

    @property
    def modifiers(self) -> Modifiers | None:
        """The user's expressions, as kernels compile them."""
        return modifiers_of(self.functions, self.layouts)

    @property
    def modifier_strides(self) -> tuple[Any, ...]:
        """What kernels take by value for them."""
        return strides_of(self.modifiers, self.layouts)

    @property
    def block_modifiers(self) -> Modifiers | None:
        """The same of kernels that walk the tiles that a block mask leaves."""
        return modifiers_of(self.functions, self.layouts, blocks=BLOCK_LISTS)

    @property
    def block_modifier_strides(self) -> tuple[Any, ...]:
        """What those take by value."""
        return strides_of(self.block_modifiers, self.layouts)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(B, H, Sq, Sk), to which mask and bias broadcast."""
        return (self.batch, self.heads, self.sq, self.sk)


FORWARD_RESULTS = ("out", "lse")
BACKWARD_RESULTS = ("dq", "dk", "dv", "dbias", "dsinks")
ARRAY_FIXES = {
    "seqused_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
    "alibi_slopes": "pass a float array of shape (H,) or (B, H)",
    "sinks": "pass a float array of shape (H,)",
    "cos": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "sin": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "cu_seqlens_q": "pass an int32 array of shape (B + 1,)",
    "cu_seqlens_k": "pass an int32 array of shape (B + 1,)",
}
"""What to pass instead of a number or a list, where an array of that alone would not do."""
FORWARD_FIXES = {**ARRAY_FIXES, **fixes_of_results(*FORWARD_RESULTS)}
SHOWN_AS = {name: f"grads.{name}" for name in BACKWARD_RESULTS}
"""The names of backward's results in errors: as the caller gives them."""


Outputs = tuple[tuple[str, Output], ...]


def forward_outputs(problem: AttentionProblem, return_lse: bool) -> Outputs:
    """Return what a forward call writes."""
    out = ("out", Output(problem.out_shape, problem.dtype))
    lse = ("lse", Output(problem.lse_shape, LSE_DTYPE))
    return (out, lse) if return_lse else (out,)


def gradient_outputs(problem: AttentionProblem) -> Outputs:
    """Return what a backward call writes: dbias and dsinks only where there are bias and sinks."""
    return tuple(
        (name, Output(of.shape, of.dtype))
        for name in BACKWARD_RESULTS
        if (of := problem.given(name[1:])) is not None
    )


def result_layouts(problem: AttentionProblem, outputs: Outputs) -> dict[str, Layout]:
    """Return how the results lie: as the caller's arrays do, otherwise contiguous."""
    return {
        name: problem.layouts.get(name)
        or problem.placed(name, contiguous(output.shape, output.dtype))
        for name, output in outputs
    }


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
