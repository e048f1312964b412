"""Attention of NumPy arrays in float32: tiles of queries, with products by BLAS.

The scores of a tile of queries and of all keys that some of them may see are computed at once, for
all query heads of a key-value head together: keys that causal order and the window hide from a
whole tile are skipped, and no head is copied. `cupyattn.ops.attention.reference` defines the
function. It computes float64 arrays, dropout and functions of scores, and calls with a result that
is not finite or with scores that may overflow.

lse is computed in float64 from a row's maximum and sum. Keys and queries are rotated in float64 and
rounded to float32. The bound is `cupyattn.ops.attention.bounds.cpu_attention_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention import reference
from cupyattn.ops.attention.problem import (
    AttentionArrays,
    QuantizedKeyArrays,
    QuantizedPagedArrays,
)
from cupyattn.ops.attention.reference.quantised import quantised_operands
from cupyattn.ops.attention.reference.scores import ScoreBlocks
from cupyattn.ops.rope.reference import rotate
from cupyattn.runtime.outputs import widened
from cupyattn.runtime.precision import Float32, Float64

_SCORES = 2**16
"""Scores computed at a time: a core's second cache holds them."""
_FEWEST_ROWS = 32
"""Products of fewer rows are slow: a tile has so many, however many keys there are."""
_LARGEST = 3e38
"""Sums up to here, with their rounding errors, do not overflow in float32."""
_BY_REFERENCE = ("dropout_p", "score_mod", "mask_mod")


def attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], /, **options: Any
) -> tuple[NDArray[Any], Float64]:
    """Return out (B, Sq, H, Dv) in float32, and lse (B, H, Sq) in float64.

    Parameters
    ----------
    q, k, v, **options
        As for `reference.attention`.
    """
    if q.dtype == np.float64 or any(options.get(name) for name in _BY_REFERENCE):
        return reference.attention(q, k, v, **options)
    blocks = ScoreBlocks(q, k, v, **options)
    batch, heads, sq, _ = blocks.full_shape
    out = np.zeros((batch, sq, heads, v.shape[-1]), np.float32)
    lse = np.full((batch, heads, sq), -np.inf)
    with np.errstate(all="ignore"):
        for b in range(batch if heads else 0):
            _attend(blocks, b, out[b], lse[b])
    finite = np.isfinite(out).all() and not np.isnan(lse).any() and not np.isposinf(lse).any()
    if not finite or (np.isneginf(lse).any() and _may_overflow(blocks)):
        return reference.attention(q, k, v, **options)
    return out, lse


def operands(
    arrays: AttentionArrays[NDArray[Any]], *, exact_q: bool = False
) -> tuple[NDArray[Any], ...]:
    """Return q, k and v of a call; of int8 keys the floats whose products the kernel has.

    With `exact_q` it does not quantise q.
    """
    q, k, v = arrays.q, arrays.k, arrays.v
    if not isinstance(arrays, (QuantizedKeyArrays, QuantizedPagedArrays)):
        return q, k, v
    pieces: Any = arrays.k_scales, arrays.k_centre, arrays.cu_seqlens_k
    return (*(x.astype(np.float32) for x in quantised_operands(q, k, *pieces, exact_q=exact_q)), v)


def _may_overflow(blocks: ScoreBlocks) -> bool:
    """Tell whether a float32 score may be -inf although no key is hidden."""
    with np.errstate(all="ignore"):
        q, k = (float(np.abs(widened(x)).max(initial=0)) for x in (blocks.q, blocks.k))
        most = q * k * blocks.q.shape[-1] * max(abs(blocks.scale), 1)
        if blocks.rotary is not None:
            most *= 2
        if blocks.bias is not None:
            bias = np.abs(widened(blocks.bias))
            most += float(bias.max(initial=0, where=np.isfinite(bias)))
    return not most <= _LARGEST


def _attend(blocks: ScoreBlocks, b: int, out: Float32, lse: Float64) -> None:
    """Write the results of a batch element."""
    _, heads, sq, _ = blocks.full_shape
    used, groups = int(blocks.used[b]), blocks.k.shape[2]
    q, k = _rotated(blocks, b)
    v = widened(blocks.v[b, :used])
    together = groups if heads * sq * used <= _SCORES else 1  # key-value heads at a time
    each = heads // groups
    sinks = None if blocks.sinks is None else np.asarray(blocks.sinks, np.float64)
    height = max(_SCORES // max(each * used, 1), _FEWEST_ROWS)
    for first in range(0, groups, together):
        own = slice(first, first + together)
        of_heads = slice(first * each, (first + together) * each)
        for rows, keys in _tiles(blocks, b, height):
            count = rows.stop - rows.start
            tile = widened(q[rows, of_heads]).transpose(1, 0, 2).reshape(together, -1, q.shape[-1])
            scores = np.matmul(tile, k[keys, own].transpose(1, 2, 0))
            scores *= np.float32(blocks.scale)
            of_each = scores.reshape(together * each, count, -1)  # a view
            _modify(blocks, b, of_heads, rows, keys, of_each)
            largest = of_each.max(axis=-1, initial=-np.inf)
            if sinks is not None:
                largest = np.maximum(largest, sinks[of_heads, None].astype(np.float32))
            largest[np.isneginf(largest)] = 0
            of_each -= largest[..., None]
            np.exp(of_each, out=of_each)
            total = of_each.sum(axis=-1)
            if sinks is not None:
                total += np.exp(sinks[of_heads, None] - largest).astype(np.float32)
            lse[of_heads, rows] = largest + np.log(total.astype(np.float64))
            total[total == 0] = 1
            results = np.matmul(scores, v[keys, own].transpose(1, 0, 2)).reshape(*total.shape, -1)
            results /= total[..., None]
            out[rows, of_heads] = results.transpose(1, 0, 2)


def _rotated(blocks: ScoreBlocks, b: int) -> tuple[NDArray[Any], Float32]:
    """Return the queries and the keys in use of a batch element, the latter in float32."""
    q, k = blocks.q[b], blocks.k[b, : int(blocks.used[b])]
    if blocks.rotary is None:
        return q, widened(k)
    of_queries, of_keys = blocks.angles(b, np.arange(len(q))), blocks.angles(b)
    q, k = (
        rotate(x, cos[:, None], sin[:, None], interleaved=blocks.interleaved).astype(np.float32)
        for x, (cos, sin) in ((q, of_queries), (k, of_keys))
    )
    return q, k


def _tiles(blocks: ScoreBlocks, b: int, height: int) -> Iterator[tuple[slice, slice]]:
    """Yield queries, and the keys that some of them may see."""
    _, _, sq, _ = blocks.full_shape
    used, offset = int(blocks.used[b]), int(blocks.offsets[b])
    for first in range(0, sq, height):
        rows = slice(first, min(first + height, sq))
        start, stop = 0, used
        if blocks.left is not None:
            start = min(max(rows.start + offset - blocks.left, 0), used)
        if blocks.right is not None:
            stop = max(min(rows.stop + offset + blocks.right, used), start)
        yield rows, slice(start, stop)


def _modify(
    blocks: ScoreBlocks, b: int, heads: slice, rows: slice, keys: slice, scores: Float32
) -> None:
    """Apply softcap, bias, ALiBi and masks to scores (heads, rows, keys), in place."""
    if blocks.softcap:
        scores /= np.float32(blocks.softcap)
        np.tanh(scores, out=scores)
        scores *= np.float32(blocks.softcap)
    if blocks.bias is not None:
        scores += widened(_part(blocks.bias, b, heads, rows, keys))
    if blocks.alibi_slopes is not None:
        slopes = np.broadcast_to(np.asarray(blocks.alibi_slopes), blocks.full_shape[:2])[b, heads]
        distance = np.abs(_distance(blocks, b, rows, keys)).astype(np.float32)
        scores -= slopes.astype(np.float32)[:, None, None] * distance
    first, last = rows.start + int(blocks.offsets[b]), rows.stop - 1 + int(blocks.offsets[b])
    if blocks.right is not None and keys.stop > first + blocks.right + 1:
        some = slice(max(first + blocks.right + 1, keys.start), keys.stop)
        hidden = _distance(blocks, b, rows, some) > blocks.right
        scores[..., some.start - keys.start :] += _added(hidden)
    if blocks.left is not None and keys.start < last - blocks.left:
        some = slice(keys.start, min(last - blocks.left, keys.stop))
        hidden = _distance(blocks, b, rows, some) < -blocks.left
        scores[..., : some.stop - keys.start] += _added(hidden)
    if blocks.mask is not None:
        scores += _added(~_part(blocks.mask, b, heads, rows, keys))


def _distance(blocks: ScoreBlocks, b: int, rows: slice, keys: slice) -> NDArray[np.int64]:
    """Return the position of each key minus that of each query."""
    positions = np.arange(rows.start, rows.stop) + blocks.offsets[b]
    return np.arange(keys.start, keys.stop) - positions[:, None]


def _part(array: NDArray[Any], b: int, heads: slice, rows: slice, keys: slice) -> NDArray[Any]:
    """Return what an array that broadcasts to (B, H, Sq, Sk) has for some scores, not broadcast."""
    shape = (1,) * (4 - array.ndim) + array.shape
    at = (slice(b, b + 1), heads, rows, keys)
    index = (slice(None) if extent == 1 else part for extent, part in zip(shape, at, strict=True))
    found: NDArray[Any] = array.reshape(shape)[tuple(index)][0]
    return found


def _added(hidden: NDArray[np.bool_]) -> Float32:
    """Return what to add to scores: -inf where they are hidden."""
    return np.where(hidden, np.float32(-np.inf), np.float32(0))
