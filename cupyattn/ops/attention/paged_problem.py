"""A checked call of paged attention: its layouts once, its values each time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.ops.attention.checks import checked_longest, require_bounds, require_heads_options
from cupyattn.ops.attention.kernels.decode import INTEGER_BITS, TILE_KEYS
from cupyattn.ops.attention.options import AttentionOptions
from cupyattn.ops.attention.problem import (
    FORWARD_RESULTS,
    AttentionProblem,
    PagedArrays,
    as_batch,
)
from cupyattn.ops.attention.values import counts_of, require_alibi, require_sinks
from cupyattn.runtime.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    INTEGERS,
    Overlaps,
    require_arrays,
    require_contiguous_rows,
    require_dtype,
    require_output,
    require_rank,
    require_same_dtype,
    require_shape,
    require_whole_item_strides,
    require_workspace,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.records import given_of
from cupyattn.runtime.tables import MAX_HEAD_DIM
from cupyattn.runtime.value_checks import checks_values, on_host


@dataclass(frozen=True, eq=False)
class PagedProblem(AttentionProblem):
    """A valid call of paged attention: the caches are k and v, and Sk is what the table can hold.

    Packed queries are those of a batch, (B, max_seqlen_q, H, D) with a batch stride of 0.
    """

    given: PagedArrays[Layout]
    layouts: PagedArrays[Layout]
    num_blocks: int
    block_size: int

    @property
    def block_table(self) -> Layout:
        """The layout of the table."""
        assert self.layouts.block_table is not None
        return self.layouts.block_table


def paged_problem(
    operands: Operands[PagedArrays[Array]], options: tuple[Any, ...], max_seqlen_q: Any
) -> PagedProblem:
    """Check a call; its description, unless that was checked before, and its values.

    `options` are the first ones of `AttentionOptions`, in that order.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public function documents.
    """
    window = options[AttentionOptions._fields.index("window_size")]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    try:
        problem = _checked(operands.description, sides, max_seqlen_q, *options)
    except TypeError:  # perhaps of an option without a hash, of which its check says more
        problem = _checked.__wrapped__(operands.description, sides, max_seqlen_q, *options)
    if checks_values(operands):
        _check_values(problem, operands.arrays)
    problem.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096, typed=True)
def _checked(description: Description, _: Any, max_seqlen_q: Any, *options: Any) -> PagedProblem:
    given = layouts_of(PagedArrays[Layout], description)
    layouts = {given.SHOWN_AS.get(n, n): layout for n, layout in given_of(given).items()}
    require_arrays(layouts, ("q", "k_cache", "v_cache", "block_table", "seqlens_k"))
    q, k, v = layouts["q"], layouts["k_cache"], layouts["v_cache"]
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    packed = "cu_seqlens_q" in layouts
    require_dtype("q", q, CPU_FLOATS)
    require_rank("q", q, "total H D" if packed else "B Sq H D")
    for name in ("k_cache", "v_cache"):
        require_dtype(name, layouts[name], (*CPU_FLOATS, *INTEGER_BITS))
        require_rank(name, layouts[name], "num_blocks block_size G D")
    for name in ("q", "k_cache", "v_cache"):
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, ("k_cache", "v_cache"))
    if k.dtype.name not in INTEGER_BITS:
        require_same_dtype(layouts, ("q", "k_cache", "v_cache"))
    require_scales(layouts)
    *_, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k.shape
    batch, sq = _queries(layouts, max_seqlen_q)
    require_caches(q, k, v)
    of = "cu_seqlens_q" if packed else "q"
    require_scale_shapes(layouts)
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_shape("block_table", table, (batch, table.shape[1]), f"(B, max_blocks) with {of}'s B")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, (batch,), f"(B,) with {of}'s B")
    for name in ("block_table", "seqlens_k", "k_scales", "v_scales"):
        if name in layouts:
            require_whole_item_strides(name, layouts[name])
    placed = {
        name: as_batch(name, layout, batch, sq, 0)
        for name in ("q", *FORWARD_RESULTS)
        if packed and (layout := getattr(given, name)) is not None
    }
    problem = PagedProblem(
        batch=batch,
        sq=sq,
        sk=table.shape[1] * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=q.dtype,
        given=given,
        layouts=replace(given, **placed),
        starts=starts_of(PagedArrays[int], description),
        options=AttentionOptions(*options).checked(head_dim),
        overlaps=Overlaps.of(given, (*FORWARD_RESULTS, "workspace")),
        num_blocks=num_blocks,
        block_size=block_size,
    )
    require_heads_options(problem)
    if given.out is not None:
        require_output("out", given.out, problem.out_shape, problem.dtype)
    if given.lse is not None:
        require_output("lse", given.lse, problem.lse_shape, problem.lse_dtype)
    if given.workspace is not None:
        require_workspace(given.workspace)
    return problem


def require_caches(q: Layout, k: Layout, v: Layout) -> None:
    """Raise unless heads, head dims and blocks of q and the caches fit."""
    *_, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k.shape
    stored, meaning = head_dim, "(num_blocks, block_size, G, D) with q's D"
    if k.dtype == np.uint8:
        _require_pairs(head_dim)
        stored, meaning = head_dim // 2, "(num_blocks, block_size, G, D / 2): two items a byte"
    require_shape("k_cache", k, (*k.shape[:3], stored), meaning)
    require_shape("v_cache", v, k.shape, "shaped like k_cache")
    if (kv_heads == 0 and heads) or (kv_heads and heads % kv_heads):
        raise error(
            ValueError,
            f"q has H = {heads} heads, the caches have G = {kv_heads}",
            "H is a multiple of G (grouped-query attention), or equal to it",
            "check the head axis: caches are (num_blocks, block_size, heads, head dim)",
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise error(
            ValueError,
            f"D = {head_dim}",
            f"head dims are 1 to {MAX_HEAD_DIM}",
            "split the head, or check that the last axis is the head dim",
        )
    if block_size == 0 or block_size % TILE_KEYS:
        raise error(
            ValueError,
            f"k_cache has blocks of {block_size} tokens",
            f"block sizes are multiples of {TILE_KEYS}",
            f"make the caches with a block_size of {TILE_KEYS} or 256, say",
        )


def _require_pairs(head_dim: int) -> None:
    if head_dim % 2:
        raise error(
            ValueError,
            f"D = {head_dim} with caches of uint8",
            "a byte holds two items of 4 bits: D is even",
            "pad the head by an item of 0, or use caches of int8",
        )


def require_scales(layouts: dict[str, Layout]) -> None:
    """Raise unless caches of integers, and only these, come with scales."""
    cache = layouts["k_cache"].dtype.name
    for name in ("k_scales", "v_scales"):
        if (name in layouts) == (cache in INTEGER_BITS):
            continue
        if name in layouts:
            raise error(
                ValueError,
                f"{name} was given with caches of {cache}",
                f"only caches of {' and '.join(INTEGER_BITS)} have scales",
                "leave it out, or pass the caches that the scales belong to",
            )
        raise error(
            ValueError,
            f"caches of {cache} without {name}",
            "an integer is worth as much as its token and head's scale says",
            f"pass {name}, float32 (num_blocks, block_size, G), as append_kv has filled it",
        )


def require_scale_shapes(layouts: dict[str, Layout]) -> None:
    """Raise unless scales that are there are those of the caches."""
    shape = layouts["k_cache"].shape[:3]
    for name in ("k_scales", "v_scales"):
        if name in layouts:
            require_dtype(name, layouts[name], ("float32",))
            require_shape(
                name, layouts[name], shape, "(num_blocks, block_size, G), as the caches are"
            )


def _queries(layouts: dict[str, Layout], max_seqlen_q: Any) -> tuple[int, int]:
    """Return B, and the most query tokens of a sequence."""
    if "cu_seqlens_q" not in layouts:
        batch, sq, *_ = layouts["q"].shape
        return batch, sq
    batch = require_bounds("cu_seqlens_q", layouts["cu_seqlens_q"])
    return batch, checked_longest("max_seqlen_q", max_seqlen_q, layouts["q"])


def _check_values(problem: PagedProblem, arrays: PagedArrays[Array]) -> None:
    """Check lengths and the block ids that will be read, sinks and slopes."""
    queries = _query_counts(problem, arrays)
    assert arrays.seqused_k is not None
    assert arrays.block_table is not None
    lengths = on_host(arrays.seqused_k).astype(np.int64)
    capacity, size = problem.sk, problem.block_size
    table = on_host(arrays.block_table)
    if ((lengths < 0) | (lengths > capacity)).any():
        at = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise error(
            ValueError,
            f"seqlens_k[{at}] = {lengths[at]}",
            f"each is at least 0 and at most {capacity}: {table.shape[1]} blocks of {size}",
            "pass a block_table with more columns, or shorter sequences",
        )
    left = problem.window[0]
    first = np.zeros_like(lengths)
    if left is not None:  # of the first query's window
        first = np.clip(lengths - queries - left, 0, lengths) // size
    columns = np.arange(table.shape[1])
    read = (columns >= first[:, None]) & (columns < -(-lengths // size)[:, None])
    read &= (queries > 0)[:, None]
    wrong = read & ((table < 0) | (table >= problem.num_blocks))
    if wrong.any():
        b, column = (int(axis[0]) for axis in np.nonzero(wrong))
        raise error(
            ValueError,
            f"block_table[{b}, {column}] = {table[b, column]}",
            f"the caches have blocks 0 to {problem.num_blocks - 1}, and sequence {b} of "
            f"{lengths[b]} tokens reads this entry",
            "pass the ids of blocks that hold the tokens; -1 may stand only where a window hides "
            "all of a block",
        )
    if arrays.sinks is not None:
        require_sinks(arrays.sinks)
    if arrays.alibi_slopes is not None:
        require_alibi(problem, arrays.alibi_slopes, lengths - queries, queries, lengths)


def _query_counts(problem: PagedProblem, arrays: PagedArrays[Array]) -> np.ndarray:
    """Return the query tokens of each sequence."""
    bounds = arrays.cu_seqlens_q
    if bounds is None:
        return np.full(problem.batch, problem.sq, np.int64)
    return counts_of("cu_seqlens_q", bounds, problem.total_q, problem.sq, whole=False)
