"""A checked call of attention: its arrays, its options, and how its sequences lie.

Kernels and checks see packed rows (total, H, D) as those of a batch whose sequences are all as long
as the longest and begin at the first row, (B, longest, H, D) with a batch stride of 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import numpy as np

from cupyattn.ops.attention.kernels.modifiers import BLOCK_LISTS, Modifiers
from cupyattn.ops.attention.modifiers import UserFunctions, modifiers_of, strides_of
from cupyattn.ops.attention.options import ALL_OPTIONS, TEACHING_OPTIONS, AttentionOptions
from cupyattn.runtime.arrays import Layout, contiguous
from cupyattn.runtime.checks import Overlaps, fixes_of_results, require_output
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import Record, T, given_of, values_of

LSE_DTYPE = np.dtype(np.float32)
MAX_LENGTH = 2**30 - 2**10  # a row of the last tile stays below kFar (masks.cuh)
FORWARD_RESULTS = ("out", "lse")
BACKWARD_RESULTS = ("dq", "dk", "dv", "dbias", "dsinks")
Outputs = Mapping[str, Output]
"""The results of a call, by the fields of its record."""


ARRAY_FIXES = {
    "seqused_k": "pass an int32 array of shape (B,), for example numpy.full(B, length, 'int32')",
    "alibi_slopes": "pass a float array of shape (H,) or (B, H)",
    "sinks": "pass a float array of shape (H,)",
    "cos": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "sin": "pass a float array of shape (positions, R/2), as rope_tables makes",
    "cu_seqlens_q": "pass an int32 array of shape (B + 1,)",
    "cu_seqlens_k": "pass an int32 array of shape (B + 1,)",
}
"""The fix for a number or a list in an array's place, where an array of that alone would not do."""
FORWARD_FIXES = {**ARRAY_FIXES, **fixes_of_results(*FORWARD_RESULTS)}


@dataclass(slots=True)
class AttentionArrays(Record[T]):
    """The arrays of one forward call of a batch, without those of rarer options.

    Each field costs every call some time: those options have `WholeAttentionArrays`.
    """

    q: T
    k: T
    v: T
    seqused_k: T | None = None
    mask: T | None = None
    bias: T | None = None
    alibi_slopes: T | None = None
    sinks: T | None = None
    out: T | None = None
    lse: T | None = None
    workspace: T | None = None
    if TYPE_CHECKING:
        cu_seqlens_q: T | None = None
        cu_seqlens_k: T | None = None
        q_offset: T | None = None
        cos: T | None = None
        sin: T | None = None
        block_mask: T | None = None
    else:
        cu_seqlens_q = cu_seqlens_k = q_offset = cos = sin = block_mask = None

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType({"block_mask": "mask_mod's tiles"})
    FIXES: ClassVar[Mapping[str, str]] = FORWARD_FIXES
    """The fixes that errors propose for a field that is no array."""


@dataclass(slots=True)
class WholeAttentionArrays(AttentionArrays[T]):
    """The arrays of one forward call, of a batch or of packed sequences."""

    cu_seqlens_q: T | None = None
    cu_seqlens_k: T | None = None
    q_offset: T | None = None
    """None too where q_offset is a number."""
    cos: T | None = None
    sin: T | None = None
    block_mask: T | None = None
    """The tiles that a mask_mod leaves."""


@dataclass(slots=True)
class QuantizedKeyArrays(WholeAttentionArrays[T]):
    """The arrays of one forward call over int8 keys: k are the codes."""

    k_scales: T | None = None
    k_centre: T | None = None

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**AttentionArrays.SHOWN_AS, "k_scales": "keys.scales", "k_centre": "keys.centre"}
    )


A = TypeVar("A", bound=AttentionArrays[Any])


def whole(arrays: A) -> A:
    """Return a record that has a field for the arrays of every option."""
    if type(arrays) is not AttentionArrays:
        return arrays
    return cast("A", WholeAttentionArrays(*values_of(arrays)))


@dataclass(slots=True)
class AttentionBackwardArrays(WholeAttentionArrays[T]):
    """The arrays of one backward call: out and lse are what the forward gave."""

    dout: T | None = None
    dlse: T | None = None
    dq: T | None = None
    dk: T | None = None
    dv: T | None = None
    dbias: T | None = None
    dsinks: T | None = None

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**AttentionArrays.SHOWN_AS, **{name: f"grads.{name}" for name in BACKWARD_RESULTS}}
    )
    FIXES: ClassVar[Mapping[str, str]] = ARRAY_FIXES


@dataclass(slots=True)
class PagedArrays(WholeAttentionArrays[T]):
    """The arrays of one call over a paged cache: k and v are the caches, seqused_k the lengths."""

    block_table: T | None = None
    k_scales: T | None = None
    v_scales: T | None = None

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"k": "k_cache", "v": "v_cache", "seqused_k": "seqlens_k"}
    )


@dataclass(slots=True)
class QuantizedPagedArrays(PagedArrays[T]):
    """The arrays of one call over a paged cache whose keys are `QuantizedKeys`: k are the codes."""

    k_centre: T | None = None

    SHOWN_AS: ClassVar[Mapping[str, str]] = MappingProxyType(
        {**PagedArrays.SHOWN_AS, "k_centre": "k_cache.centre"}
    )


ROWS_OF_QUERIES = frozenset({"q", "out", "lse", "dout", "dlse", "dq"})
ROWS_OF_KEYS = frozenset({"k", "v", "dk", "dv"})
_PACKED = ROWS_OF_QUERIES | ROWS_OF_KEYS | {"k_scales"}


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """A valid call of attention; letters as in the public API.

    Two calls of one description share one object, which is therefore a key of caches. Where
    sequences are packed, Sq and Sk are those of the longest.
    """

    batch: int
    sq: int
    sk: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    given: AttentionArrays[Layout]
    """The arrays as the caller gave them."""
    layouts: AttentionArrays[Layout]
    """The arrays with packed rows as those of a batch."""
    starts: AttentionArrays[int]
    """By how many bytes each array misses a vector's alignment."""
    options: AttentionOptions
    """With defaults in the place of None, and causality in the window."""
    overlaps: Overlaps

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed: q is (total, H, D)."""
        return self.given.cu_seqlens_q is not None

    @property
    def total_q(self) -> int:
        """Query rows of all sequences."""
        return self.given.q.shape[0] if self.packed else self.batch * self.sq

    @property
    def total_k(self) -> int:
        """Key rows of all sequences."""
        return self.given.k.shape[0] if self.packed else self.batch * self.sk

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(B, Sq, H, Dv), or (total_q, H, Dv)."""
        rows = (self.total_q,) if self.packed else (self.batch, self.sq)
        return (*rows, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, H, Sq), or (H, total_q)."""
        if self.packed:
            return (self.heads, self.total_q)
        return (self.batch, self.heads, self.sq)

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """(B, H, Sq, Sk), to which mask and bias broadcast."""
        return (self.batch, self.heads, self.sq, self.sk)

    @property
    def lse_dtype(self) -> np.dtype:
        """The dtype of lse and its gradient: float32, for float64 arrays float64."""
        return self.dtype if self.dtype == np.float64 else LSE_DTYPE

    def query_tiles(self, rows: int) -> int:
        """Return how many tiles of query rows of one head the sequences have, or could have."""
        return self._most_tiles(self.sq, self.total_q, rows)

    def key_tiles(self, keys: int) -> int:
        """Return how many tiles of keys of one head the sequences have, or could have."""
        return self._most_tiles(self.sk, self.total_k, keys)

    def _most_tiles(self, longest: int, total: int, rows: int) -> int:
        tiles = self.batch * -(-longest // rows)
        return min(tiles, (total + self.batch * (rows - 1)) // rows) if self.packed else tiles

    def as_batch(self, name: str, layout: Layout) -> Layout:
        """Return the layout of an array that the call would be given, as `layouts` has it."""
        return as_batch(name, layout, self.batch, self.sq, self.sk) if self.packed else layout

    def moved(self, arrays: Mapping[str, Layout], without: Collection[str] = ()) -> Any:
        """Return the call with `arrays` elsewhere, which begin where vectors do.

        It is `without` some of its other arrays.
        """
        placed = {name: self.as_batch(name, layout) for name, layout in arrays.items()}
        absent: dict[str, Any] = dict.fromkeys(without)
        return replace(
            self,
            given=replace(self.given, **arrays, **absent),
            layouts=replace(self.layouts, **placed, **absent),
            starts=replace(self.starts, **{**absent, **dict.fromkeys(arrays, 0)}),
        )

    @cached_property
    def functions(self) -> UserFunctions:
        """The user's own expressions, which each call needs."""
        return self.options.functions

    @cached_property
    def has_values(self) -> bool:
        """Whether there are arrays whose values can be wrong: lengths, positions, slopes, sinks.

        With float16 accumulators v is one of them.
        """
        given = self.given
        return self.options.accumulator == "float16" or any(
            array is not None
            for array in (
                *(given.seqused_k, given.q_offset, given.cu_seqlens_q, given.cu_seqlens_k),
                *(given.alibi_slopes, given.sinks, given.cos),
            )
        )

    @property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        assert self.options.softmax_scale is not None
        return self.options.softmax_scale

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Keys to the left and right that a query sees, causality included; None is unbounded."""
        return self.options.window_size or (None, None)

    @property
    def q_offset(self) -> int | None:
        """The position of query 0, if no array has it; None for the last query at the last key."""
        return self.options.q_offset

    @property
    def ends_with_keys_in_use(self) -> bool:
        """Whether seqused_k decides the positions of queries."""
        given = self.q_offset is not None or self.layouts.q_offset is not None
        return self.layouts.seqused_k is not None and not given

    @property
    def first_position(self) -> int | None:
        """The position of query 0; None where sequences differ, or where an array has it."""
        if self.layouts.q_offset is not None or (self.ends_with_keys_in_use and not self.packed):
            return None
        if self.packed or self.q_offset is not None:
            return self.q_offset
        return self.sk - self.sq

    @property
    def refusable_options(self) -> frozenset[str]:
        """The options of the call that some kernels do not have."""
        arrays = {"rotary" if name == "cos" else name for name in given_of(self.layouts)}
        return frozenset((arrays | self.options.used) & (ALL_OPTIONS - TEACHING_OPTIONS))

    @property
    def modifiers(self) -> Modifiers | None:
        """The user's expressions, as kernels compile them."""
        return modifiers_of(self.functions, self.layouts) if any(self.functions) else None

    @property
    def modifier_strides(self) -> tuple[Any, ...]:
        """The strides of the expressions' arrays, which kernels take by value."""
        return strides_of(self.modifiers, self.layouts) if any(self.functions) else ()

    @property
    def block_modifiers(self) -> Modifiers | None:
        """The expressions for kernels that go through the tiles that a block mask leaves."""
        if not any(self.functions):
            return None
        return modifiers_of(self.functions, self.layouts, blocks=BLOCK_LISTS)

    @property
    def block_modifier_strides(self) -> tuple[Any, ...]:
        """The strides that those kernels take by value."""
        return strides_of(self.block_modifiers, self.layouts) if any(self.functions) else ()


def as_batch(name: str, layout: Layout, batch: int, sq: int, sk: int) -> Layout:
    """Return packed rows, or sums of rows (H, total), as those of a batch; others as they are.

    Examples
    --------
    >>> as_batch("lse", Layout((4, 9), (36, 4), np.dtype(np.float32)), 2, 6, 8)
    Layout(shape=(2, 4, 6), strides=(0, 36, 4), dtype=dtype('float32'))
    """
    if name not in _PACKED:
        return layout
    longest = sq if name in ROWS_OF_QUERIES else sk
    shape, strides, dtype = layout
    if 0 in shape:  # whose strides say nothing
        strides = contiguous(shape, dtype).strides
    if name in ("lse", "dlse"):
        return Layout((batch, shape[0], longest), (0, *strides), dtype)
    return Layout((batch, longest, *shape[1:]), (0, *strides), dtype)


def forward_outputs(problem: AttentionProblem, return_lse: bool) -> Outputs:
    """Return what a forward call writes."""
    outputs = {"out": Output(problem.out_shape, problem.dtype)}
    if return_lse:
        outputs["lse"] = Output(problem.lse_shape, problem.lse_dtype)
    return outputs


def require_results(given: Record[Layout], outputs: Outputs) -> None:
    """Raise unless the caller's arrays for results have their shapes and dtypes."""
    for name, output in outputs.items():
        layout: Layout | None = getattr(given, name)
        if layout is not None:
            require_output(given.SHOWN_AS.get(name, name), layout, *output)


def gradient_outputs(problem: AttentionProblem) -> Outputs:
    """Return what a backward call writes: dbias and dsinks only where there are bias and sinks."""
    return {
        name: Output(of.shape, of.dtype)
        for name in BACKWARD_RESULTS
        if (of := getattr(problem.given, name[1:])) is not None
    }


def with_results(problem: AttentionProblem, outputs: Outputs) -> Any:
    """Return `layouts` with the results: as the caller's arrays lie, otherwise contiguous."""
    made = {
        name: problem.as_batch(name, contiguous(*output))
        for name, output in outputs.items()
        if getattr(problem.layouts, name) is None
    }
    return replace(problem.layouts, **made)
