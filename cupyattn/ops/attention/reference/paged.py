"""Attention over a paged cache: blocks are gathered, and the rest is dense. And exact merging."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import dequantise
from cupyattn.ops.attention.reference.dense import attention
from cupyattn.runtime.precision import U32, Float64, precision_of


def gathered(
    cache: NDArray[Any],
    block_table: NDArray[Any],
    seqlens_k: NDArray[Any],
    /,
    scales: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Take the tokens of each sequence, (B, longest, G, D) in the cache's dtype, zeros after them.

    Entries of the table below 0 give zeros, too: blocks that precede a window. With scales
    the cache is of integers, and the tokens are float64.
    """
    if scales is not None:
        stored = (gathered(each, block_table, seqlens_k) for each in (cache, scales))
        return dequantise(*stored)
    block_size = cache.shape[1]
    longest = int(np.max(seqlens_k, initial=0))
    tokens = np.zeros((len(seqlens_k), longest, *cache.shape[2:]), cache.dtype)
    for b, length in enumerate(seqlens_k):
        blocks = block_table[b, : -(-int(length) // block_size)]
        present = blocks >= 0
        if present.all():
            taken = cache[blocks]
        else:
            taken = np.zeros((len(blocks), *cache.shape[1:]), cache.dtype)
            taken[present] = cache[blocks[present]]
        tokens[b, :length] = taken.reshape(-1, *cache.shape[2:])[:length]
    return tokens


def paged_attention(
    q: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_table: NDArray[Any],
    seqlens_k: NDArray[Any],
    /,
    *,
    cu_seqlens_q: NDArray[Any] | None = None,
    k_scales: NDArray[Any] | None = None,
    v_scales: NDArray[Any] | None = None,
    attend: Callable[..., Any] = attention,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attention of each sequence's last tokens to all of its tokens.

    Parameters
    ----------
    q : (B, Sq, H, D), or packed (total, H, D)
    k_cache, v_cache : (num_blocks, block_size, G, D) floats
        Or what `quantise` has stored, with k_scales, v_scales : (num_blocks, block_size, G).
    block_table : (B, max_blocks), seqlens_k : (B,) ints
    cu_seqlens_q : (B + 1,) ints
        Where the packed rows of each sequence begin, and where the last one's end; later rows
        give zeros.
    attend : callable
        Computes the dense attention of sequences.
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    out : (B, Sq, H, D) or (total, H, D) float64
    lse : (B, H, Sq) or (H, total) float64
    """
    caches = (k_cache, k_scales), (v_cache, v_scales)
    if cu_seqlens_q is None:
        k, v = (gathered(cache, block_table, seqlens_k, scales) for cache, scales in caches)
        return attend(q, k, v, seqused_k=seqlens_k, **options)
    dim = q.shape[-1] if v_scales is not None else v_cache.shape[-1]
    out, lse = np.zeros((*q.shape[:-1], dim)), np.zeros((q.shape[1], q.shape[0]))
    for b, (begin, end) in enumerate(pairwise(cu_seqlens_q)):
        if begin == end:  # its table may have nothing
            continue
        own = slice(b, b + 1)
        slopes = options.get("alibi_slopes")
        each = dict(options)
        if slopes is not None and slopes.ndim == 2:
            each["alibi_slopes"] = slopes[own]
        results = paged_attention(
            q[None, begin:end],
            k_cache,
            v_cache,
            block_table[own],
            seqlens_k[own],
            k_scales=k_scales,
            v_scales=v_scales,
            attend=attend,
            **each,
        )
        out[begin:end], lse[:, begin:end] = (result[0] for result in results)
    return out, lse


def merge_attention(
    out_a: NDArray[Any], lse_a: NDArray[Any], out_b: NDArray[Any], lse_b: NDArray[Any], /
) -> tuple[Float64, Float64]:
    """Attention to the keys of both parts: weights are exp(lse_part - lse).

    They are normalised by their sum: an lse of both that is large has no digits left for its
    logarithm. A part whose lse is -inf has no part in the result, whatever its out is. An lse of
    +inf or NaN gives NaN.
    """
    a, b = (np.asarray(lse, np.float64) for lse in (lse_a, lse_b))
    with np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore"):
        top = np.maximum(a, b)
        weights = [np.where(np.isneginf(lse), 0.0, np.exp(lse - top)) for lse in (a, b)]
        total = weights[0] + weights[1]
        out = np.zeros(out_a.shape)
        for part, of_part in zip((out_a, out_b), weights, strict=True):
            weight = np.swapaxes(of_part / np.where(total == 0, 1.0, total), 1, 2)[..., None]
            out += np.where(weight == 0, 0.0, weight * np.asarray(part, np.float64))
        return out, top + np.log(total)


def merge_attention_bound(
    out_a: NDArray[Any],
    lse_a: NDArray[Any],
    out_b: NDArray[Any],
    lse_b: NDArray[Any],
    /,
    *,
    dtype: str | None = None,
) -> tuple[Float64, Float64]:
    """Error bounds of merge_attention's results in float32 arithmetic; out has `dtype`, or out_a's.

    With d = |lse_a - lse_b|: a weight is exp2((lse_part - top) log2(e)) over the sum of both. Its
    exponent errs by 3 u32 d (difference, constant, product), ex2.approx and the division by 2**-22
    each, so that weights err by (6 d + 16) u32 relative to themselves, and the larger one by as
    much of the smaller at the most; the sum of products rounds twice more. lse is top + log of a
    sum of weights: (6 d w + 8) u32 with w the smaller one's share, and its own rounding.
    """
    precision = precision_of(dtype or out_a.dtype.name)
    a, b = (np.asarray(lse, np.float64) for lse in (lse_a, lse_b))
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    with np.errstate(invalid="ignore"):
        distance = np.abs(a - b)
        # Beyond, the smaller weight is flushed to 0.
        relative = (6 * np.where(distance < 128, distance, 128) + 20) * U32
        size, _ = merge_attention(np.abs(out_a), lse_a, np.abs(out_b), lse_b)
        out_bound = np.swapaxes(relative, 1, 2)[..., None] * size + precision.store(out)
        lse_bound = np.where(np.isinf(lse), 0.0, relative + 4 * U32 * np.abs(lse))
    return out_bound, lse_bound
