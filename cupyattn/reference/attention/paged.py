"""Attention over a paged cache: blocks are gathered, and the rest is dense. And exact merging."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.reference.attention.bounds import U32, precision_of
from cupyattn.reference.attention.dense import attention
from cupyattn.reference.attention.scores import Float64


def gathered(
    cache: NDArray[Any], block_table: NDArray[Any], seqlens_k: NDArray[Any], /
) -> NDArray[Any]:
    """Take the tokens of each sequence, (B, longest, G, D) in the cache's dtype, zeros behind them.

    Entries of the table below 0 give zeros, too: blocks that a window has left behind.
    """
    block_size = cache.shape[1]
    longest = int(np.max(seqlens_k, initial=0))
    tokens = np.zeros((len(seqlens_k), longest, *cache.shape[2:]), cache.dtype)
    for b, length in enumerate(seqlens_k):
        for column in range(-(-int(length) // block_size)):
            block = int(block_table[b, column])
            keys = slice(column * block_size, min(int(length), (column + 1) * block_size))
            if block >= 0:
                tokens[b, keys] = cache[block, : keys.stop - keys.start]
    return tokens


def paged_attention(
    q: NDArray[Any],
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    block_table: NDArray[Any],
    seqlens_k: NDArray[Any],
    /,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Attention of each sequence's last tokens to all of its tokens.

    Parameters
    ----------
    q : (B, Sq, H, D), k_cache, v_cache : (num_blocks, block_size, G, D) floats
    block_table : (B, max_blocks), seqlens_k : (B,) ints
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    out : (B, Sq, H, D) float64
    lse : (B, H, Sq) float64
    """
    k, v = (gathered(cache, block_table, seqlens_k) for cache in (k_cache, v_cache))
    return attention(q, k, v, seqused_k=seqlens_k, **options)


def merge_attention(
    out_a: NDArray[Any], lse_a: NDArray[Any], out_b: NDArray[Any], lse_b: NDArray[Any], /
) -> tuple[Float64, Float64]:
    """Attention to the keys of both parts: weights are exp(lse_part - lse).

    A part whose lse is -inf has no part in the result, whatever its out is.
    """
    a, b = (np.asarray(lse, np.float64) for lse in (lse_a, lse_b))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        lse = np.logaddexp(a, b)
        out = np.zeros(out_a.shape)
        for part, part_lse in ((out_a, a), (out_b, b)):
            weight = np.where(np.isneginf(part_lse), 0.0, np.exp(part_lse - lse))
            weight = np.swapaxes(weight, 1, 2)[..., None]
            out += np.where(weight == 0, 0.0, weight * np.asarray(part, np.float64))
    return out, lse


def merge_attention_bound(
    out_a: NDArray[Any], lse_a: NDArray[Any], out_b: NDArray[Any], lse_b: NDArray[Any], /
) -> tuple[Float64, Float64]:
    """Error bounds of merge_attention's results in float32 arithmetic.

    With d = |lse_a - lse_b|: a weight is exp2((lse_part - top) log2(e)) over the sum of both. Its
    exponent errs by 3 u32 d (difference, constant, product), ex2.approx and the division by 2**-22
    each, so that weights err by (6 d + 16) u32 relative to themselves, and the larger one by as
    much of the smaller at the most; the sum of products rounds twice more. lse is top + log of a
    sum of weights: (6 d w + 8) u32 with w the smaller one's share, and its own rounding.
    """
    precision = precision_of(out_a.dtype.name)
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
