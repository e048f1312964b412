"""Valid calls of the cache's functions, and the checks that make them.

Layouts are checked once for each description of a call's arrays, values in every call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.cache.kernels import AppendArrays, CacheArrays, CopyArrays, GatherArrays
from cupyattn.ops.norms.api import NormNumbers
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    Overlaps,
    fixes_of_results,
    integer,
    require_contiguous_rows,
    require_dtype,
    require_given,
    require_output,
    require_own_items,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import given_of
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import checks_values, on_host

_CACHES = ("k_cache", "v_cache")
WRITTEN = (*_CACHES, "k_scales", "v_scales")
RESULTS = ("k", "v")
"""Results of `gather`."""
_SCALES_DTYPE = np.dtype(np.float32)
_FORMATS = {"int8": "int8", "uint8": "int4"}
"""Quantised formats by the dtype of the array: two items of 4 bits share an unsigned byte."""
WRITTEN_FIXES = fixes_of_results(*WRITTEN)
"""Advice of errors for caches and scales, which are written: a converted copy would not do."""
_LAYER_AXES = "num_blocks block_size G D"
_POOL_AXES = f"num_layers {_LAYER_AXES}"


class Caches(NamedTuple):
    """Extents and dtype of the caches of a call."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype
    """The dtype of keys and values, or of values if keys are centred."""
    centred: bool = False
    """Whether keys are int8 codes of their differences from a centre, and values are floats."""

    @property
    def quantised(self) -> bool:
        """Whether both have scales."""
        return self.dtype.name in _FORMATS

    @property
    def format(self) -> str:
        """Name of the storage format: the dtype's name, or int4 for nibbles."""
        return _FORMATS.get(self.dtype.name, self.dtype.name)

    @property
    def slots(self) -> int:
        """Tokens that the caches have room for."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, eq=False)
class AppendProblem:
    """A valid call of append_kv."""

    caches: Caches
    layouts: AppendArrays[Layout]
    starts: AppendArrays[int]
    """By how many bytes each array misses a vector's alignment."""
    interleaved: bool
    q_norm: NormNumbers | None
    k_norm: NormNumbers | None
    overlaps: Overlaps

    @property
    def tokens(self) -> tuple[int, ...]:
        """(total,) or (B, S)."""
        return self.layouts.slot_mapping.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of k, v and q."""
        return self.layouts.k.dtype

    @property
    def half(self) -> int:
        """Pairs of features that are rotated."""
        return 0 if self.layouts.cos is None else self.layouts.cos.shape[1]


@dataclass(frozen=True, eq=False)
class CopiesProblem:
    """A valid call of copy_blocks."""

    caches: Caches
    layouts: CopyArrays[Layout]
    starts: CopyArrays[int]
    overlaps: Overlaps

    @property
    def pooled(self) -> bool:
        """Whether the caches have all layers, on their first axis."""
        return len(self.layouts.k_cache.shape) == len(_POOL_AXES.split())


@dataclass(frozen=True, eq=False)
class GatherProblem:
    """A valid call of gather."""

    caches: Caches
    layouts: GatherArrays[Layout]
    starts: GatherArrays[int]
    output: Output
    """Shape and dtype of k, and of v: (B, max_seqlen_k, G, D)."""
    overlaps: Overlaps

    @property
    def capacity(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.layouts.block_table.shape[1] * self.caches.block_size


def append_problem(
    operands: Operands[AppendArrays[Array]],
    *,
    interleaved: bool,
    q_norm: NormNumbers | None,
    k_norm: NormNumbers | None,
) -> AppendProblem:
    """Check a call of append_kv: its description, unless checked before, and its values."""
    problem = checked_append(operands.description, interleaved, q_norm, k_norm)
    problem.overlaps.check(operands)
    if checks_values(operands):
        arrays = operands.arrays
        _require_slots(arrays.slot_mapping, problem.caches)
        if arrays.positions is not None and problem.layouts.cos is not None:
            # q is rotated for tokens that are left out, too.
            stored = arrays.slot_mapping if arrays.q is None else None
            _require_positions(arrays.positions, stored, problem.layouts.cos.shape[0])
    return problem


@lru_cache(maxsize=4096)
def checked_append(
    description: Description,
    interleaved: bool,
    q_norm: NormNumbers | None,
    k_norm: NormNumbers | None,
) -> AppendProblem:
    """Check the description of a call of append_kv."""
    layouts = layouts_of(AppendArrays[Layout], description)
    caches = _require_caches(layouts, written=True, centred=True)
    k, v, slots = layouts.k, layouts.v, layouts.slot_mapping
    for name, layout in (("k", k), ("v", v), ("slot_mapping", slots)):
        require_given(name, layout)
    require_dtype("slot_mapping", slots, INTEGERS)
    require_whole_item_strides("slot_mapping", slots)
    axes = "B S G D" if len(k.shape) == 4 else "total G D"
    for name, layout in (("k", k), ("v", v)):
        require_dtype(name, layout, CPU_FLOATS)
        require_rank(name, layout, axes)
        require_contiguous_rows(name, layout)
    tokens = k.shape[:-2]
    heads = caches.kv_heads, caches.head_dim
    require_shape("k", k, (*tokens, *heads), f"({', '.join(axes.split())}) with the caches' G, D")
    require_shape("v", v, k.shape, "shaped like k")
    require_shape("slot_mapping", slots, tokens, f"({', '.join(axes.split()[:-2])}) of k's tokens")
    _require_rotary(layouts, caches.head_dim)
    _require_norms(layouts, caches.head_dim)
    if layouts.q is not None:
        _require_queries(layouts, layouts.q, axes.replace("G", "H"))
    given = given_of(layouts)
    require_same_dtype(given, ("q", "k", "v"))
    weights = ("q_weight", "k_weight")
    named = {layouts.SHOWN_AS[name]: given[name] for name in weights if name in given}
    require_same_dtype({"k": k, **named})
    if not caches.quantised:
        require_same_dtype(given, ("k", "v", *_CACHES[caches.centred :]))
    _require_centre(layouts.k_centre, caches)
    starts = starts_of(AppendArrays[int], description)
    overlaps = Overlaps.of(layouts, (*WRITTEN, "q"))
    return AppendProblem(caches, layouts, starts, interleaved, q_norm, k_norm, overlaps)


def _require_centre(centre: Layout | None, caches: Caches) -> None:
    if (centre is not None) != caches.centred:
        raise error(
            ValueError if centre is not None else TypeError,
            f"k_centre was given with caches of {caches.dtype.name}"
            if centre is not None
            else "k_centre is None, with a k_cache of int8 and a v_cache of floats",
            "keys that are codes of differences from a centre, int8, come with values in v's dtype",
            "leave it out, or pass such caches and k_scales"
            if centre is not None
            else "pass k_centre, (G, D) of float32",
        )
    if centre is not None:
        require_dtype("k_centre", centre, (_SCALES_DTYPE.name,))
        require_shape("k_centre", centre, (caches.kv_heads, caches.head_dim), "(G, D)")
        require_contiguous_rows("k_centre", centre)


def _require_norms(layouts: AppendArrays[Layout], head_dim: int) -> None:
    if layouts.q_weight is not None and layouts.q is None:
        raise error(
            ValueError,
            "q_norm was given without q",
            "it normalises the heads of q",
            "pass q, or leave q_norm out",
        )
    for name in ("q_weight", "k_weight"):
        layout, shown = getattr(layouts, name), layouts.SHOWN_AS[name]
        if layout is not None:
            require_dtype(shown, layout, CPU_FLOATS)
            require_shape(shown, layout, (head_dim,), "(D,)")
            require_contiguous_rows(shown, layout)


def _require_queries(layouts: AppendArrays[Layout], q: Layout, axes: str) -> None:
    if layouts.cos is None and layouts.q_weight is None:
        raise error(
            ValueError,
            "q was given without rotary",
            "q is there to be rotated or normalised",
            "pass rotary=(cos, sin) and positions, or q_norm, or leave q out",
        )
    require_dtype("q", q, CPU_FLOATS)
    require_rank("q", q, axes)
    *tokens, _, head_dim = layouts.k.shape
    expected = (*tokens, q.shape[-2], head_dim)
    require_shape("q", q, expected, f"({', '.join(axes.split())}) with k's tokens and D")
    require_output("q", q, q.shape, q.dtype)


def _require_rotary(layouts: AppendArrays[Layout], head_dim: int) -> None:
    cos, sin, positions = layouts.cos, layouts.sin, layouts.positions
    if (cos is None) != (positions is None):
        there, absent = ("positions", "rotary") if cos is None else ("rotary", "positions")
        raise error(
            TypeError,
            f"{there} was given without {absent}",
            "rotary needs the position of each token, and positions are for rotary",
            f"pass {absent}, or leave {there} out",
        )
    if cos is None or sin is None or positions is None:
        return
    for name, table in (("rotary's cos", cos), ("rotary's sin", sin)):
        require_dtype(name, table, CPU_FLOATS)
        require_rank(name, table, "positions R/2")
        require_contiguous_rows(name, table)
    require_shape("rotary's sin", sin, cos.shape, "(positions, R/2) like cos")
    require_same_dtype({"cos": cos, "sin": sin})
    if 2 * cos.shape[1] > head_dim:
        raise error(
            ValueError,
            f"rotary's tables have {cos.shape[1]} columns, which rotate {2 * cos.shape[1]} "
            "features",
            f"there are D = {head_dim}",
            f"pass tables of at most {head_dim // 2} columns",
        )
    require_dtype("positions", positions, INTEGERS)
    tokens = layouts.slot_mapping.shape
    require_shape("positions", positions, tokens, "shaped like slot_mapping")
    require_whole_item_strides("positions", positions)


def _require_slots(slot_mapping: Array, caches: Caches) -> None:
    """Raise ValueError for a slot that is neither in the caches nor -1, or that is given twice.

    Waits for a GPU.
    """
    slots = on_host(slot_mapping)
    at = _first_where((slots < -1) | (slots >= caches.slots))
    if at is not None:
        raise error(
            ValueError,
            f"slot_mapping[{_index(at)}] is {slots[at]}",
            f"the caches have slots 0 to {caches.slots - 1} ({caches.num_blocks} blocks of "
            f"{caches.block_size}), and -1 leaves a token out",
            "pass block * block_size + offset of a block that there is",
        )
    flat = slots.ravel()
    order = np.argsort(flat, kind="stable")
    same = _first_where((flat[order[1:]] == flat[order[:-1]]) & (flat[order[1:]] >= 0))
    if same is not None:
        first, second = (np.unravel_index(order[same[0] + i], slots.shape) for i in (0, 1))
        raise error(
            ValueError,
            f"slot_mapping[{_index(first)}] and slot_mapping[{_index(second)}] are both "
            f"{slots[second]}",
            "a slot is written once in a call: the order of its tokens is undefined",
            "pass -1 for the token that is to be left out",
        )


def _require_positions(positions: Array, slot_mapping: Array | None, length: int) -> None:
    """Raise ValueError if a token's position is not in the tables, unless its slot is -1."""
    places = on_host(positions)
    outside = (places < 0) | (places >= length)
    if slot_mapping is not None:
        outside &= on_host(slot_mapping) >= 0
    at = _first_where(outside)
    if at is not None:
        raise error(
            ValueError,
            f"positions[{_index(at)}] is {places[at]}",
            f"the tables of rotary have rows 0 to {length - 1}",
            "pass longer tables, or other positions",
        )


Pairs = tuple[tuple[int, int], ...]
"""(src, dst) of each copy."""


def copies_problem(operands: Operands[CopyArrays[Array]], pairs: Pairs | None) -> CopiesProblem:
    """Check a call of copy_blocks: its description, unless checked before, and its values.

    `pairs` are the copies, None where they are an array.
    """
    problem = checked_copies(operands.description)
    problem.overlaps.check(operands)
    num_blocks, copies = problem.caches.num_blocks, operands.arrays.copies
    if pairs is not None:
        _require_blocks(pairs, num_blocks, padded=False)
    elif copies is not None and checks_values(operands):
        _require_blocks(on_host(copies).tolist(), num_blocks, padded=True)
    return problem


@lru_cache(maxsize=4096)
def checked_copies(description: Description) -> CopiesProblem:
    """Check the description of a call of copy_blocks."""
    layouts = layouts_of(CopyArrays[Layout], description)
    caches = _require_caches(layouts, written=True, pools=True, centred=True)
    copies = layouts.copies
    if copies is not None:
        require_dtype("copies", copies, INTEGERS)
        require_whole_item_strides("copies", copies)
        if len(copies.shape) != 2 or copies.shape[1] != 2:
            raise error(
                ValueError,
                f"copies has shape {copies.shape}",
                "it is (n, 2), a row (src, dst) for each copy",
                "pass such an array, or a sequence of Copy(src, dst)",
            )
    starts = starts_of(CopyArrays[int], description)
    return CopiesProblem(caches, layouts, starts, Overlaps.of(layouts, WRITTEN))


def pairs_of(copies: Any) -> Pairs:
    """Return the copies of a sequence.

    Raises
    ------
    TypeError
        If it is no sequence, or one of its items is no pair of integers.
    """
    try:
        items = tuple(copies)
    except TypeError as failure:
        raise error(
            TypeError,
            f"copies has type {type(copies).__name__}",
            "it must be a sequence of Copy(src, dst), or an array (n, 2) of integers",
            "pass what Sequence.append has returned",
        ) from failure
    return tuple([_pair(f"copies[{i}]", copy) for i, copy in enumerate(items)])


def _pair(name: str, copy: object) -> tuple[int, int]:
    if not isinstance(copy, tuple | list) or len(copy) != 2:
        raise error(
            TypeError,
            f"{name} is {shown(copy)}",
            "each copy is a pair (src, dst)",
            "pass Copy(src, dst) of two block ids",
        )
    src, dst = copy
    return integer(f"{name}'s src", src), integer(f"{name}'s dst", dst)


def _require_blocks(pairs: Iterable[Iterable[int]], num_blocks: int, *, padded: bool) -> None:
    for i, (src, dst) in enumerate(pairs):
        if padded and src == dst == -1:
            continue
        if not (0 <= src < num_blocks and 0 <= dst < num_blocks):
            raise error(
                ValueError,
                f"copies[{i}] is ({src}, {dst})",
                f"the caches have blocks 0 to {num_blocks - 1}"
                + (", and a row (-1, -1) copies nothing" if padded else ""),
                "pass the ids of blocks of these caches",
            )


def gather_problem(
    operands: Operands[GatherArrays[Array]], max_seqlen_k: int | None, dtype: np.dtype | None
) -> GatherProblem:
    """Check a call of gather: its description, unless checked before, and its values."""
    problem = checked_gather(operands.description, max_seqlen_k, dtype)
    problem.overlaps.check(operands)
    if checks_values(operands):
        _require_tokens(problem, operands.arrays)
    return problem


@lru_cache(maxsize=4096)
def checked_gather(
    description: Description, max_seqlen_k: int | None, dtype: np.dtype | None
) -> GatherProblem:
    """Check the description of a call of gather."""
    layouts = layouts_of(GatherArrays[Layout], description)
    caches = _require_caches(layouts)
    table, seqlens = layouts.block_table, layouts.seqlens_k
    require_given("block_table", table)
    require_given("seqlens_k", seqlens)
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, table.shape[:1], "(B,) with block_table's B")
    require_whole_item_strides("block_table", table)
    require_whole_item_strides("seqlens_k", seqlens)
    if max_seqlen_k is not None and max_seqlen_k < 0:
        raise error(
            ValueError,
            f"max_seqlen_k = {max_seqlen_k}",
            "it is 0 or more: the tokens that the results have room for",
            "pass the longest length, or leave it out",
        )
    length = table.shape[1] * caches.block_size if max_seqlen_k is None else max_seqlen_k
    shape = (table.shape[0], length, caches.kv_heads, caches.head_dim)
    output = Output(shape, _result_dtype(caches, layouts.k, dtype))
    for name, layout in (("out's k", layouts.k), ("out's v", layouts.v)):
        if layout is not None:
            require_output(name, layout, *output)
    starts = starts_of(GatherArrays[int], description)
    return GatherProblem(caches, layouts, starts, output, Overlaps.of(layouts, RESULTS))


def _result_dtype(caches: Caches, given: Layout | None, dtype: np.dtype | None) -> np.dtype:
    if caches.quantised:
        return dtype or (np.dtype(np.float16) if given is None else given.dtype)
    if dtype not in (None, caches.dtype):
        raise error(
            ValueError,
            f"dtype = {dtype} with caches of {caches.dtype.name}",
            "results have the caches' dtype, but for quantised ones",
            "leave it out, and convert the results",
        )
    return caches.dtype


def _require_tokens(problem: GatherProblem, arrays: GatherArrays[Array]) -> None:
    """Check lengths and the block ids that are read."""
    lengths = on_host(arrays.seqlens_k).astype(np.int64)
    most = min(problem.capacity, problem.output.shape[1])
    at = _first_where((lengths < 0) | (lengths > most))
    if at is not None:
        raise error(
            ValueError,
            f"seqlens_k[{at[0]}] = {lengths[at]}",
            f"each is at least 0 and at most {most}: block_table has room for {problem.capacity} "
            f"tokens, the results for {problem.output.shape[1]}",
            "pass a block_table with more columns or a larger max_seqlen_k, or shorter sequences",
        )
    table, num_blocks = on_host(arrays.block_table), problem.caches.num_blocks
    columns = np.arange(table.shape[1])
    read = columns < -(-lengths // problem.caches.block_size)[:, None]
    at = _first_where(read & ((table < -1) | (table >= num_blocks)))
    if at is not None:
        raise error(
            ValueError,
            f"block_table[{at[0]}, {at[1]}] = {table[at]}",
            f"the caches have blocks 0 to {num_blocks - 1}, -1 is a block that is gone, and "
            f"sequence {at[0]} of {lengths[at[0]]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens",
        )


def _require_caches(
    layouts: CacheArrays[Layout],
    *,
    written: bool = False,
    pools: bool = False,
    centred: bool = False,
) -> Caches:
    """Check k_cache and v_cache, and their scales, which quantised caches have.

    With `pools` they may have an axis of layers before the others, with `centred` int8 keys and
    float values.
    """
    k, v = layouts.k_cache, layouts.v_cache
    require_given("k_cache", k)
    require_given("v_cache", v)
    axes = _POOL_AXES if pools and len(k.shape) == len(_POOL_AXES.split()) else _LAYER_AXES
    fixes = WRITTEN_FIXES if written else {}
    for name, layout in zip(_CACHES, (k, v), strict=True):
        require_dtype(name, layout, (*CPU_FLOATS, *_FORMATS), fixes.get(name, ""))
        require_rank(name, layout, axes)
        require_contiguous_rows(name, layout, fixes.get(name, ""))
    of_int8_keys = k.dtype.name == "int8" and v.dtype.name in CPU_FLOATS
    if of_int8_keys and not centred:
        raise error(
            TypeError,
            f"k_cache has int8, v_cache has {v.dtype}",
            "such caches hold int8 keys, codes of differences from a centre, which gather does not "
            "make floats of",
            "gather the values alone, as k_cache and as v_cache; a key is "
            "k_cache * k_scales[..., None] + k_centre",
        )
    centred = of_int8_keys
    if not centred:
        require_same_dtype({"k_cache": k, "v_cache": v})
    require_shape("v_cache", v, k.shape, "shaped like k_cache")
    num_blocks, block_size, kv_heads, items = k.shape[-4:]
    head_dim = 2 * items if _FORMATS.get(k.dtype.name) == "int4" else items
    caches = Caches(num_blocks, block_size, kv_heads, head_dim, v.dtype, centred)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise error(
            ValueError,
            f"k_cache has shape {k.shape}, D = {head_dim}",
            f"head dims are 1 to {MAX_HEAD_DIM}",
            "check that the last axis is the head dim",
        )
    if block_size == 0:
        raise error(
            ValueError,
            f"k_cache has shape {k.shape}: blocks of no token",
            "a block has at least one",
            f"check the axes: caches are ({', '.join(axes.split())})",
        )
    scales = (("k_scales", layouts.k_scales), ("v_scales", layouts.v_scales))
    for (name, layout_or_none), cache in zip(scales, (k, v), strict=True):
        _require_scales(name, layout_or_none, cache, axes, fixes.get(name, ""))
    if written:
        for name, layout_or_none in (("k_cache", k), ("v_cache", v), *scales):
            if layout_or_none is not None:
                require_own_items(name, layout_or_none)
    return caches


def _require_scales(
    name: str, layout: Layout | None, cache: Layout, cache_axes: str, fix: str
) -> None:
    axes, shape = ", ".join(cache_axes.split()[:-1]), cache.shape[:-1]
    if cache.dtype.name not in _FORMATS:
        if layout is None:
            return
        raise error(
            ValueError,
            f"{name} was given with caches of {cache.dtype.name}",
            "only caches of int8 and uint8 (two items of 4 bits) have scales",
            "leave it out",
        )
    if layout is None:
        raise error(
            TypeError,
            f"{name} is None, and the caches have dtype {cache.dtype.name}",
            f"quantised caches have a float32 scale for each token and head, ({axes})",
            f"pass {name}, here of shape {shape}",
        )
    require_dtype(name, layout, (_SCALES_DTYPE.name,), fix)
    require_shape(name, layout, shape, f"({axes}) as its cache")
    require_whole_item_strides(name, layout, fix)


def _first_where(wrong: np.ndarray) -> tuple[int, ...] | None:
    """Return the index of the first item that is true, None if there is none."""
    if not wrong.any():
        return None
    return tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))


def _index(at: Iterable[int]) -> str:
    return ", ".join(map(str, at))
