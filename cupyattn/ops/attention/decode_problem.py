"""What a call of paged attention asks for, and its checks: of layouts once, of values each time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cupyattn.arrays import Array, Description, Layout, Operands, layouts_of, starts_of
from cupyattn.errors import error
from cupyattn.kernels.configs.attention.decode import TILE_KEYS
from cupyattn.kernels.configs.tables import MAX_HEAD_DIM
from cupyattn.ops.attention.options import (
    checked_softcap,
    checked_softmax_scale,
    checked_window,
)
from cupyattn.ops.attention.problem import FORWARD_RESULTS, AttentionProblem
from cupyattn.ops.attention.values import MAX_SINK
from cupyattn.ops.checks import (
    CPU_FLOATS,
    FLOATS,
    INTEGERS,
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
from cupyattn.ops.overlaps import Overlaps
from cupyattn.ops.value_checks import checks_values, on_host

MAX_QUERIES = 16
"""Query tokens of a sequence."""


@dataclass(frozen=True, eq=False)
class DecodeProblem:
    """A valid call of paged attention."""

    attention: AttentionProblem
    """With the caches as k and v, seqlens_k as seqused_k, and what the table can hold as Sk."""
    layouts: dict[str, Layout]
    """By the names of the public function."""
    num_blocks: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        """Blocks that a row of the table has room for."""
        return self.layouts["block_table"].shape[1]


def decode_problem(operands: Operands, options: tuple[Any, ...]) -> DecodeProblem:
    """Check a call; its description, unless that was checked before, and its values.

    `options` are causal, softmax_scale, window_size and softcap.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the public function documents.
    """
    window = options[2]
    sides = (*map(type, window),) if isinstance(window, tuple) else None
    try:
        problem = _checked(operands.description, sides, *options)
    except TypeError:  # perhaps of an option without a hash, of which its check says more
        problem = _checked.__wrapped__(operands.description, sides, *options)
    if checks_values(operands):
        _check_values(problem, operands.arrays)
    problem.attention.overlaps.check(operands)
    return problem


@lru_cache(maxsize=4096, typed=True)
def _checked(
    description: Description,
    _: Any,
    causal: Any,
    softmax_scale: Any,
    window_size: Any,
    softcap: Any,
) -> DecodeProblem:
    layouts = layouts_of(description)
    require_arrays(layouts, ("q", "k_cache", "v_cache", "block_table", "seqlens_k"))
    q, k, v = layouts["q"], layouts["k_cache"], layouts["v_cache"]
    table, seqlens = layouts["block_table"], layouts["seqlens_k"]
    for name, axes in (
        ("q", "B Sq H D"),
        ("k_cache", "num_blocks block_size G D"),
        ("v_cache", "num_blocks block_size G D"),
    ):
        require_dtype(name, layouts[name], CPU_FLOATS)
        require_rank(name, layouts[name], axes)
        require_contiguous_rows(name, layouts[name])
    require_same_dtype(layouts, ("q", "k_cache", "v_cache"))
    batch, sq, heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k.shape
    _require_caches(q, k, v)
    require_dtype("block_table", table, ("int32",))
    require_rank("block_table", table, "B max_blocks")
    require_shape("block_table", table, (batch, table.shape[1]), "(B, max_blocks) with q's B")
    require_dtype("seqlens_k", seqlens, INTEGERS)
    require_shape("seqlens_k", seqlens, (batch,), "(B,) with q's B")
    for name in ("block_table", "seqlens_k"):
        require_whole_item_strides(name, layouts[name])
    scale = checked_softmax_scale(softmax_scale, head_dim)
    renamed = {"k_cache": "k", "v_cache": "v", "seqlens_k": "seqused_k"}
    attention = AttentionProblem(
        batch=batch,
        sq=sq,
        sk=table.shape[1] * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=q.dtype,
        layouts={renamed.get(name, name): layout for name, layout in layouts.items()},
        starts={renamed.get(name, name): start for name, start in starts_of(description).items()},
        softmax_scale=scale,
        q_offset=None,
        window=checked_window(window_size, causal),
        softcap=checked_softcap(softcap, scale),
        dropout_p=0.0,
        mask_mod=None,
        implementation="flash",
        overlaps=Overlaps.of(layouts, (*FORWARD_RESULTS, "workspace")),
    )
    _require_option_arrays(attention)
    results = {
        "out": (attention.out_shape, attention.dtype),
        "lse": (attention.lse_shape, attention.lse_dtype),
    }
    for name in FORWARD_RESULTS:
        if name in layouts:
            require_output(name, layouts[name], *results[name])
    if "workspace" in layouts:
        require_workspace(layouts["workspace"])
    return DecodeProblem(attention, layouts, num_blocks, block_size)


def _require_caches(q: Layout, k: Layout, v: Layout) -> None:
    _, sq, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k.shape
    require_shape(
        "k_cache", k, (*k.shape[:3], head_dim), "(num_blocks, block_size, G, D) with q's D"
    )
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
    if not 1 <= sq <= MAX_QUERIES:
        raise error(
            NotImplementedError,
            f"q has Sq = {sq} query tokens a sequence",
            f"1 to {MAX_QUERIES} are decoded at once; longer prompts are not there yet",
            "pass the tokens in parts, in their order, or use attention() for a prompt",
        )


def _require_option_arrays(problem: AttentionProblem) -> None:
    layouts, heads = problem.layouts, problem.heads
    floats = CPU_FLOATS if problem.dtype == np.float64 else FLOATS
    for name in ("alibi_slopes", "sinks"):
        if name not in layouts:
            continue
        layout = layouts[name]
        require_dtype(name, layout, floats)
        if name == "alibi_slopes" and len(layout.shape) == 2:
            require_shape(name, layout, (problem.batch, heads), "(H,) or (B, H)")
        else:
            meaning = "(H,) or (B, H)" if name == "alibi_slopes" else "(H,)"
            require_shape(name, layout, (heads,), meaning)
        require_whole_item_strides(name, layout)


def _check_values(problem: DecodeProblem, arrays: dict[str, Array]) -> None:
    """Check lengths and the block ids that will be read, and sinks."""
    lengths = on_host(arrays["seqlens_k"]).astype(np.int64)
    capacity, size = problem.attention.sk, problem.block_size
    if ((lengths < 0) | (lengths > capacity)).any():
        at = int(np.argmax((lengths < 0) | (lengths > capacity)))
        raise error(
            ValueError,
            f"seqlens_k[{at}] = {lengths[at]}",
            f"each is at least 0 and at most {capacity}: {problem.max_blocks} blocks of {size}",
            "pass a block_table with more columns, or shorter sequences",
        )
    table = on_host(arrays["block_table"])
    left = problem.attention.window[0]
    first = np.zeros_like(lengths)
    if left is not None:  # of the first query's window
        first = np.clip(lengths - problem.attention.sq - left, 0, lengths) // size
    columns = np.arange(table.shape[1])
    read = (columns >= first[:, None]) & (columns < -(-lengths // size)[:, None])
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
    if "sinks" in arrays and (on_host(arrays["sinks"]).astype(float) > MAX_SINK).any():
        raise error(
            ValueError,
            f"sinks has values up to {on_host(arrays['sinks']).max()}",
            f"each is at most {MAX_SINK:g}: times log2(e) it is still a float32",
            "pass smaller ones; -inf is no sink",
        )
