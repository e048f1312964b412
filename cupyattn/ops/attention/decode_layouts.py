"""The checks of paged attention's caches, their scales and the arrays of its options."""

from __future__ import annotations

import numpy as np

from cupyattn.ops.attention.kernels.decode import INTEGER_BITS, TILE_KEYS
from cupyattn.ops.attention.problem import AttentionProblem
from cupyattn.runtime.arrays import Layout
from cupyattn.runtime.checks import (
    CPU_FLOATS,
    FLOATS,
    require_dtype,
    require_shape,
    require_whole_item_strides,
)
from cupyattn.runtime.errors import error
from cupyattn.runtime.tables import MAX_HEAD_DIM


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


def require_option_arrays(problem: AttentionProblem) -> None:
    """Raise for slopes or sinks that do not fit."""
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
