"""Attention and its gradients in float64: what kernels and the CPU path are compared with."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.scores import (
    ScoreBlock,
    ScoreBlocks,
    normalised,
    probabilities,
)
from cupyattn.ops.rope.reference import rotate
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.precision import Float64


class AttentionGrads(NamedTuple):
    """Gradients of attention's inputs, each of its input's shape.

    As the result of `attention_backward` it has all five, in this order: dbias and dsinks are None
    without bias and sinks. (What `vjp` returns gives one for each array that it was given by
    position: three for q, k and v.) For a field of ``grads=`` that is None, the default, a new
    array is made.

    Attributes
    ----------
    dq : array (B, Sq, H, D)
        Of the queries.
    dk : array (B, Sk, G, D)
        Of the keys, summed over the query heads of a group.
    dv : array (B, Sk, G, Dv)
        Of the values, likewise.
    dbias : array of bias's shape, or None
        Of the bias, summed over the axes that it broadcast along.
    dsinks : array (H,), or None
        Of the sinks.
    """

    # Only in grads= may these be None: who reads a result need not ask whether dq is there.
    dq: Array = None  # type: ignore[assignment]
    dk: Array = None  # type: ignore[assignment]
    dv: Array = None  # type: ignore[assignment]
    dbias: Array | None = None
    dsinks: Array | None = None


def attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], /, **options: Any
) -> tuple[Float64, Float64]:
    """softmax(scores) v, and the log-sum-exp of the scores.

    Parameters
    ----------
    q : (B, Sq, H, D), k : (B, Sk, G, D), v : (B, Sk, G, Dv) floats
        H is a multiple of G.
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    out : (B, Sq, H, Dv) float64
    lse : (B, H, Sq) float64
        Natural logarithm; with the sink, before dropout. A row with no key has out = 0 and lse =
        -inf (or the sink).

    Examples
    --------
    >>> q = np.zeros((1, 1, 1, 4)); k = np.zeros((1, 2, 1, 4)); v = np.array([[[[1.0]], [[3.0]]]])
    >>> out, lse = attention(q, k, v)
    >>> out.item(), float(np.exp(lse.item()))
    (2.0, 2.0)
    """
    blocks = ScoreBlocks(q, k, v, **options)
    batch, heads, sq, _ = blocks.full_shape
    out = np.zeros((batch, sq, heads, v.shape[-1]))
    lse = np.full((batch, heads, sq), -np.inf)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for block in blocks:
            p, lse[block.at] = normalised(block.scores, blocks.sink(block.h))
            if block.kept is not None:
                p = p * block.kept
            out[block.b, block.rows, block.h] = p @ block.v
    return out, lse


def attention_backward(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    /,
    *,
    dlse: NDArray[Any] | None = None,
    **options: Any,
) -> AttentionGrads:
    """Gradients of sum(dout * out) + sum(dlse * lse).

    The given out and lse are used as they are: those of a whole attention, given with a part of its
    keys, yield that part's gradients.

    Parameters
    ----------
    dout : (B, Sq, H, Dv) floats
        Gradient of out.
    q, k, v
        As in `attention`.
    out : (B, Sq, H, Dv), lse : (B, H, Sq) floats
        The results of `attention`, possibly rounded.
    dlse : (B, H, Sq) floats, optional
        Gradient of lse.
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    AttentionGrads of float64 arrays
        dq and dk are with respect to the arrays before the rotary embedding.

    Notes
    -----
    Dao et al., "FlashAttention", arXiv:2205.14135, appendix B.2: with P = exp(S - lse) and
    delta = rowsum(dout * out) - dlse, dV = P^T dout, dS = P * (dout V^T - delta), dQ = dS K, dK =
    dS^T Q.
    """
    blocks = ScoreBlocks(q, k, v, **options)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dbias = None if blocks.bias is None else np.zeros(np.shape(blocks.bias))
    dsinks = None if blocks.sinks is None else np.zeros(np.shape(blocks.sinks))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for block in blocks:
            block_dout, block_lse = block.rows_of(dout), np.asarray(lse[block.at], np.float64)
            delta = row_delta(block, dout, out, dlse)
            p = probabilities(block.scores, block_lse)
            dp = block_dout @ block.v.T
            kept_p = p
            if block.kept is not None:
                kept_p, dp = p * block.kept, dp * block.kept
            # A NaN in a query's row reaches the keys that the query sees, and no other.
            ds = np.where(block.hidden, 0.0, p * (dp - delta[:, None]))
            ds = blocks.before_score_mod(block, ds)
            dv[block.b, block.keys, block.g] += kept_p.T @ block_dout
            if dbias is not None:
                add_broadcast(dbias, block, ds)
            sink = blocks.sink(block.h)
            if dsinks is not None and sink is not None:
                sink_p = probabilities(np.full((len(delta), 1), sink), block_lse)[:, 0]
                dsinks[block.h] -= sink_p @ delta
            if block.slope is not None:
                ds = ds * block.slope
            dq[block.b, block.rows, block.h] = blocks.scale * (ds @ block.k)
            dk[block.b, block.keys, block.g] += blocks.scale * (ds.T @ block.q)
        _rotate_back(blocks, dq, dk)
    return AttentionGrads(dq, dk, dv, dbias, dsinks)


def row_delta(
    block: ScoreBlock, dout: NDArray[Any], out: NDArray[Any], dlse: NDArray[Any] | None
) -> Float64:
    """Compute delta = rowsum(dout * out) - dlse of a block's rows."""
    delta: Float64 = (block.rows_of(dout) * block.rows_of(out)).sum(axis=-1)
    return delta if dlse is None else delta - np.asarray(dlse[block.at], np.float64)


def add_broadcast(total: Float64, block: ScoreBlock, x: Float64) -> None:
    """Add a block (rows, keys) to what broadcasts to (B, H, Sq, Sk), summing where it does."""
    batches, heads, sq, sk = shape = (1,) * (4 - total.ndim) + total.shape
    if sq == 1:
        x = x.sum(axis=0, keepdims=True)
    if sk == 1:
        x = x.sum(axis=1, keepdims=True)
    rows = slice(0, 1) if sq == 1 else block.rows
    keys = slice(0, 1) if sk == 1 else block.keys
    b, h = min(block.b, batches - 1), min(block.h, heads - 1)
    total.reshape(shape)[b, h, rows, keys] += x


def _rotate_back(blocks: ScoreBlocks, dq: Float64, dk: Float64) -> None:
    """Turn gradients of the rotated q and k into gradients of q and k, in place."""
    if blocks.rotary is None:
        return
    for b, used in enumerate(blocks.used):
        of_queries = blocks.angles(b, np.arange(dq.shape[1]))
        for x, (cos, sin) in ((dq[b], of_queries), (dk[b, :used], blocks.angles(b))):
            x[...] = rotate(x, cos[:, None], -sin[:, None], interleaved=blocks.interleaved)
