"""How far a right kernel may be from the reference: a bound for every element of every result.

The kernel that the bounds describe reads inputs of its dtype, computes in float32, keeps what feeds
a tensor core (P, dS) and rotated q and k in its dtype, accumulates in float32 in any order (atomics
too), and rounds once at the store. Tolerances are thereby computed, not chosen: a kernel outside of
its bound has a bug, and a bound within a factor of ten or so of real errors finds bugs that
`allclose` lets pass.

Letters: u32 = 2**-24 is the unit round-off of float32, u_in that of what P is kept in, u_out that
of the results. A sum of n terms, each rounded once, errs by at most about n u32 times the sum of
their absolute values, in any order (Higham, "Accuracy and stability of numerical algorithms",
section 4.2). Tensor cores truncate where float32 units round to nearest; a factor of two on u32
covers it. `tiny` is what a value may lose besides: half a subnormal's spacing in float16, and what
-ftz=true flushes in float32. `flush` is what a P may lose, relative to its row's largest.

Forward, for one row with D = head dim, n keys, T tiles of keys and reach_j = |softmax_scale| |q|
|k_j|^T:

    ds  = (D + 2) u32 max_j reach_j + u32 max_j magnitude_j + softcap eps_tanh
    eps = u_in + 4 ds + (n + 8 T) u32
    |out - ref| <= eps (P |V|) + flush sum_j |V_j| + f n 2**-126 + u_out |ref| + tiny
    |lse - ref| <= 2 ds + (n + 8 T) u32 + 4 u32 (|ref| + log n + exponent_shift) + n flush

- ds is the error of a score: the dot product (D terms, the scale, its conversion to base 2), the
  roundings of the sums with bias and ALiBi (magnitude is the sum of the absolute values of
  softcapped score, bias and ALiBi, and at least |sink|), and the softcap, whose slope is at most 1.
  Only keys (and a sink) whose P can reach 2**-126 within that error count: the rest weighs nothing
  in float32, so that a bias of -1e4 or the float's least, as masks often are written, does not
  blunt the bound of its row.
- A probability is exp(s - m) / l: numerator and denominator each err by ds relative to themselves;
  4 instead of 2 pays for truncation in tensor cores and for what is of second order. Where ds is
  above 1/2 that no longer holds. The output is a mean of rows of V in any case, so its error is
  at most 2 max_j |V_j|, which takes the place of 4 ds (P |V|).
- u_in is the rounding of P for the tensor core; n u32 the sums over keys, of l and of P V; 8 T u32
  each tile's exponential (ex2.approx errs by 2**-22), its rescale and the final division and
  dropout scale. Dropout's f = 1 / (1 - p) is part of P here, and comes last in kernels: a product
  of P and V that falls below 2**-126 is 0 before.
- With rotary, q and k are rotated in float32 and rounded to their dtype: 2 u_out + 8 u32 of reach
  more, with the norm of each rotated pair in place of its elements (it bounds |x1 cos| + |x2 sin|,
  rounding's real operands).
- exponent_shift and flush: float16 kernels may hold P times 2**-103, which packs it without
  conversions. Exponents then carry up to 112 log 2 more, and a P below 2**-23 of the row's largest
  falls below 2**-126, that is to 0. It shows where a sink outweighs every key.

The backward is given out and lse, so that each P errs on its own: see `backward_bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyattn.ops.attention.reference.dense import attention
from cupyattn.ops.attention.reference.scores import ScoreBlock, ScoreBlocks, probabilities
from cupyattn.ops.rope.reference import pairs_of
from cupyattn.runtime.precision import TINY32, U32, Float64, Precision, precision_of

# tanh as 1 - 2 / (1 + exp(2 x)): the exponential's and the reciprocal's errors, a few u32. Not
# tanh.approx, whose 2**-11 is 0.024 in a score of softcap 50.
EPS_TANH = 8 * U32
ROTATION = 8 * U32


@dataclass(frozen=True)
class ScoreErrors:
    """What the error of a block's scores is made of; 0 where a key weighs nothing.

    Attributes
    ----------
    q, k : (rows, D), (keys, D)
        Absolute values of the operands, or with rotary the norms of their rotated pairs.
    dot : float
        Relative to reach, the error of a scaled dot product.
    reach : (rows, keys)
        |softmax_scale| |q| |k|^T.
    magnitude : (rows, keys)
        |softcapped score| + |bias| + |ALiBi|.
    softcap : float
        The softcap's own error.
    visible : (rows, keys) bool
    """

    q: Float64
    k: Float64
    dot: float
    reach: Float64
    magnitude: Float64
    softcap: float
    visible: NDArray[np.bool_]

    @classmethod
    def of(
        cls, blocks: ScoreBlocks, block: ScoreBlock, lse: Float64, precision: Precision
    ) -> ScoreErrors:
        """Build them for one block of scores and the lse of its rows."""
        dot = (blocks.q.shape[-1] + 2) * U32
        q, k = np.abs(block.q), np.abs(block.k)
        if blocks.rotary is not None:
            pairs = pairs_of(blocks.rotary[0].shape[-1], interleaved=blocks.interleaved)
            q, k = pair_norms(q, pairs), pair_norms(k, pairs)
            dot += 2 * precision.u_out + ROTATION
        magnitude = np.abs(block.capped)
        for added in (block.bias, block.alibi):
            if added is not None:
                magnitude = magnitude + np.abs(added)
        reach, softcap = abs(blocks.scale) * (q @ k.T), (blocks.softcap or 0.0) * EPS_TANH
        error = exponent_error(dot * reach + U32 * magnitude + softcap, lse)
        weighs = ~(block.scores - _finite(lse)[:, None] + error < np.log(TINY32))  # a NaN does
        return cls(
            q=q,
            k=k,
            dot=dot,
            reach=np.where(weighs, reach, 0.0),
            magnitude=np.where(weighs, magnitude, 0.0),
            softcap=softcap,
            visible=~block.hidden,
        )


def _finite(lse: Float64) -> Float64:
    """Replace the infinite lse of rows without keys by 0."""
    return np.where(np.isinf(lse), 0.0, lse)


def exponent_error(ds: Float64, lse: Float64) -> Float64:
    """Error of the exponent s - lse of a probability (rows, keys), from the score's error ds.

    4 u32 |lse|: lse itself is a float32, and is multiplied by log2(e), a float32, in float32.
    """
    return 2 * ds + 4 * U32 * np.abs(_finite(lse))[:, None]


def sink_magnitude(sink: float, lse: Float64) -> Float64:
    """Take |sink| for the rows in which it weighs something, 0 for the others."""
    return np.where(probabilities(np.full((len(lse), 1), sink), lse)[:, 0] < TINY32, 0.0, abs(sink))


def pair_norms(x: Float64, pairs: tuple[slice, slice]) -> Float64:
    """Take absolute values of x (..., D), of both features of a rotary pair the pair's norm."""
    result, (firsts, seconds) = np.abs(x), pairs
    result[..., firsts] = result[..., seconds] = np.hypot(x[..., firsts], x[..., seconds])
    return result


def attention_bound(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    /,
    *,
    dtype: DTypeLike,
    tile_k: int,
    float32_weights: bool = False,
    **options: Any,
) -> tuple[Float64, Float64]:
    """Error bounds of attention's results; the module's docstring has the derivation.

    Parameters
    ----------
    q, k, v
        As in `attention`, already rounded to the kernel's dtype.
    dtype : dtype or str
        The kernel's: float16, float32 or bfloat16.
    tile_k : int
        Keys per tile of the kernel.
    **options
        See `scores.ScoreBlocks`.

    Returns
    -------
    out_bound : (B, Sq, H, Dv) float64
    lse_bound : (B, H, Sq) float64
        0 where lse is -inf.

    Raises
    ------
    ValueError
        If there are no bounds for the dtype.
    """
    precision = precision_of(dtype, float32_weights=float32_weights)
    out, lse = attention(q, k, v, **options)
    blocks = ScoreBlocks(q, k, v, **options)
    tiles = -(-k.shape[1] // tile_k)
    out_bound, lse_bound = np.zeros(out.shape), np.zeros(lse.shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for block in blocks:
            block_lse, sink = lse[block.at], blocks.sink(block.h)
            p = probabilities(block.scores, block_lse)
            errors = ScoreErrors.of(blocks, block, block_lse, precision)
            keys = errors.visible.sum(axis=-1) + (sink is not None)
            reach = errors.reach.max(axis=-1, initial=0.0)
            magnitude = errors.magnitude.max(axis=-1, initial=0.0)
            if sink is not None:
                magnitude = np.maximum(magnitude, sink_magnitude(sink, block_lse))
            ds = errors.dot * reach + U32 * magnitude + errors.softcap
            sums = (keys + 8 * tiles) * U32
            lost = ds > 0.5
            eps = precision.u_in + np.where(lost, 0.0, 4 * ds) + sums
            factor = errors.visible if block.kept is None else errors.visible * block.kept
            abs_v = np.abs(block.v)
            error = eps[:, None] * ((p * factor) @ abs_v) + precision.flush * (factor @ abs_v)
            if lost.any():
                largest = (factor[..., None] * abs_v).max(axis=1, initial=0.0)
                error += np.where(lost[:, None], 2 * largest, 0.0)
            error += TINY32 * factor.sum(axis=-1, keepdims=True)
            out_bound[block.b, block.rows, block.h] = error
            exponent = np.abs(block_lse) + np.log(np.maximum(keys, 1)) + precision.exponent_shift
            error = 2 * ds + sums + 4 * U32 * exponent + keys * precision.flush
            lse_bound[block.at] = np.where(np.isinf(block_lse), 0.0, error)
        out_bound += precision.store(out)
    return out_bound, lse_bound
