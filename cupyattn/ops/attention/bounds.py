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
  softcapped score, bias and ALiBi, and at least |sink|; native kernels may add ALiBi of a tile's
  first key to that of the difference), and the softcap, whose slope is at most 1.
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
- bfloat16 has tensor cores from sm_80 on (`native`): u_in is then 2**-8, and P is kept as it is.
  Its exponents are float32's: nothing is shifted or scaled, and no more is lost than in float32.
- Float16 accumulators (`half_sums`) add n keys of a tile in n / 8 steps, each of which rounds a sum
  to nearest: n / 8 2**-11 of the terms' absolute values, or 2**-25 where the sum is subnormal.
  P = 1 is then stored as 2**h, the largest power of two with n 2**h <= 256. So flush is 2**-14-h,
  of which only P below it lose anything, and a subnormal sum loses 2**-25-h of the row's largest P.
  Where a tile has several softmaxes (`steps`), a later one may rescale earlier P: 2**-11 each more.
- exponent_shift and flush: float16 kernels may hold P times 2**-103, which packs it without
  conversions. Exponents then carry up to 112 log 2 more, and a P below 2**-23 of the row's largest
  falls below 2**-126, that is to 0. It shows where a sink outweighs every key. Native kernels keep
  P times 2**9, of which float16 rounds away at most 2**-25: less. Their exponents carry up to 16
  log 2 more, since the maximum that they use may be that much below the row's.

Backward, which like the reference is given out and lse, so that each P errs on its own. For one
score that errs by ds = dot reach + u32
magnitude + softcap eps_tanh (each score by its own: lse is an input, so no maximum over keys
enters):

- sum(n, size) = (n + 2) (2 u32 size + 2**-126) is the error of a float32 sum of n terms whose
  absolute values sum to size, in any order: 2 u32 since tensor cores truncate, 2**-126 for what
  -ftz=true flushes.
- P = exp(s - lse) errs by e_P = P expm1(2 ds + u32 (4 |lse| + 2 exponent_shift + 8)) + tiny: lse is
  a rounded float32, the exponent is formed from a rounded lse log2(e) + shift, ex2.approx errs by
  4 u32, small P vanish. Both P are between 0 and 1, so e_P is at most max(P, 1 - P) + tiny. The
  bound therefore holds for gradients with respect to the exact lse too, if that is what is passed.
- g = dP - delta errs by e_g = sum(Dv + 2, |dout| |v|^T + |dout| |out| + |dlse|).
- dS = P g errs by e_dS = (P + e_P) e_g + e_P |g| + 2 u32 |dS|; dbias is its sum.
- The softcap's slope 1 - tanh**2 errs by 2 (eps_tanh + 2 dot reach / softcap) + 4 u32.
- What a tensor core reads of P (with dropout's factor) and dS errs by u_in of itself and tiny more;
  scale may be part of dS when it is rounded, or come later.
- dV = P^T dout, dQ = scale dS K, dK = scale dS^T Q sum those errors times |dout|, |K|, |Q|, and
  have a sum's own error. With rotary, K and Q are the rotated ones, rounded: u_out + 8 u32 of
  the absolute sum more; dQ and dK are rounded, u_out of themselves and tiny more, before the
  inverse rotation in float32, which turns the error of a pair of features into at most the norm of
  the pair's errors, and errs by 8 u32.
- Tensor cores keep dS times 2**-k, k of `range_log2` for each key-value head of a sequence: tiny of
  what they read of it is 2**k as much. V, or dout, is kept times 2**-k too: where an element then
  is below float16's normal numbers it errs by tiny, and g by 2**k tiny (|dout|_1 + |v|_1) more.
- dsinks = -sum exp(sink - lse) delta: the same with the sink as score.
- The store: u_out |ref| + tiny, for dbias and dsinks those of their own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cupyattn.ops.attention.reference.dense import (
    AttentionGrads,
    add_broadcast,
    attention,
    attention_backward,
    row_delta,
)
from cupyattn.ops.attention.reference.scores import (
    ScoreBlock,
    ScoreBlocks,
    WeightPrecision,
    probabilities,
)
from cupyattn.ops.rope.reference import pairs_of
from cupyattn.runtime.precision import TINY32, U32, Float64, Precision, precision_of

# tanh as 1 - 2 / (1 + exp(2 x)): the errors of the exponential and of a reciprocal, which four
# scores may share. Not tanh.approx, whose 2**-11 is 0.024 in a score of softcap 50.
EPS_TANH = 16 * U32
ROTATION = 8 * U32
_STALE = 16 * float(np.log(2))  # kMostLog2 in cuda_src/attention/native/softmax.cuh


@dataclass(frozen=True)
class ScoreErrors:
    """The parts of the error of a block's scores; 0 where a key weighs nothing.

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
        weighs &= ~block.hidden
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
    native: bool = False,
    half_sums: int = 0,
    steps: int = 1,
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
    float32_weights : bool
        The kernel keeps P in float32, whatever the dtype.
    native : bool
        The kernel is one of sm_80 or later, which keeps P of bfloat16 calls in bfloat16.
    half_sums : int
        Keys that are summed in float16 accumulators; 0 for float32 accumulators.
    steps : int
        Softmaxes of a tile of keys, whose P wait for one product with v.
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
    precision = WeightPrecision.of(
        dtype,
        float32_weights=float32_weights,
        native=native,
        half_sums=half_sums,
        steps=steps,
    )
    shift = max(precision.exponent_shift, _STALE if native else 0.0)
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
            if native and blocks.alibi_slopes is not None:  # five roundings, and 57 keys apart
                slopes = np.broadcast_to(blocks.alibi_slopes, blocks.full_shape[:2])
                magnitude = 3 * magnitude + 5 * 57 * min(abs(float(slopes[block.b, block.h])), 1.0)
            ds = errors.dot * reach + U32 * magnitude + errors.softcap
            sums = (keys + 8 * tiles) * U32
            lost = ds > 0.5
            eps = precision.u_in + precision.u_sums + np.where(lost, 0.0, 4 * ds) + sums
            factor = errors.visible if block.kept is None else errors.visible * block.kept
            abs_v = np.abs(block.v)
            flushed = precision.flushed(p)
            error = eps[:, None] * ((p * factor) @ abs_v) + (flushed * factor) @ abs_v
            if lost.any():
                largest = (factor[..., None] * abs_v).max(axis=1, initial=0.0)
                error += np.where(lost[:, None], 2 * largest, 0.0)
            error += TINY32 * factor.sum(axis=-1, keepdims=True)
            error += precision.tiny_sums(k.shape[1]) * factor.max(-1, keepdims=True, initial=0.0)
            out_bound[block.b, block.rows, block.h] = error
            exponent = np.abs(block_lse) + np.log(np.maximum(keys, 1)) + shift
            flushed = (flushed * errors.visible).sum(axis=-1)
            error = 2 * ds + sums + 4 * U32 * exponent + flushed
            lse_bound[block.at] = np.where(np.isinf(block_lse), 0.0, error)
        out_bound += precision.store(out)
    return out_bound, lse_bound


def cpu_attention_bound(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], /, *, dtype: DTypeLike, **options: Any
) -> tuple[Float64, Float64]:
    """Return error bounds of attention on NumPy arrays, whose out is rounded to dtype.

    They are those of a float32 kernel with two tiles of keys, and of the rounding: there is one
    tile, but NumPy's exponential errs by 6 u32 where a kernel's errs by 4.
    """
    tile_k = max(-(-k.shape[1] // 2), 1)
    out_bound, lse_bound = attention_bound(q, k, v, dtype="float32", tile_k=tile_k, **options)
    precision = precision_of(dtype)
    if precision.u_out > U32:
        exact, _ = attention(q, k, v, **options)
        out_bound += precision.store(np.abs(exact) + out_bound)
    return out_bound, lse_bound


# In cuda_src/attention/tensor_core/gradient_scale.cuh.
_MOST_LOG2, _MOST_RANGE_LOG2 = 15, 15


def sum_error(terms: Any, size: Any) -> Any:
    """Error of a float32 sum, from the number of its terms and the sum of their absolute values."""
    return (terms + 2) * (2 * U32 * size + TINY32)


@dataclass
class _Sum:
    """Sums gathered block by block: absolute values, the terms' errors, and how many terms."""

    size: Float64
    error: Float64
    terms: Float64

    @classmethod
    def zeros(cls, shape: tuple[int, ...], terms: tuple[int, ...] | None = None) -> _Sum:
        """Begin sums of a shape; `terms` is the shape of their numbers of terms, if another."""
        return cls(np.zeros(shape), np.zeros(shape), np.zeros(shape if terms is None else terms))

    def add(self, index: tuple[Any, ...], size: Any, error: Any, terms: Any) -> None:
        self.size[index] += size
        self.error[index] += error
        self.terms[index] += terms

    def add_broadcast(
        self, block: ScoreBlock, size: Float64, error: Float64, terms: NDArray[Any]
    ) -> None:
        for total, x in ((self.size, size), (self.error, error), (self.terms, terms)):
            add_broadcast(total, block, x)

    def bound(self) -> Float64:
        bound: Float64 = self.error + sum_error(self.terms, self.size)
        return bound


@dataclass(frozen=True)
class _BlockErrors:
    """Absolute values and errors of what a block computes between its inputs and its sums.

    Attributes
    ----------
    p, p_error : (rows, keys)
        With dropout's factor, the error as a tensor core reads it.
    dbias, dbias_error : (rows, keys)
        |dS| before the softcap's slope, in float32.
    ds, ds_error : (rows, keys)
        |dS|, the error as a tensor core reads it.
    sink, sink_error : float
        The block's part of dsinks.
    """

    p: Float64
    p_error: Float64
    dbias: Float64
    dbias_error: Float64
    ds: Float64
    ds_error: Float64
    sink: float
    sink_error: float


def _block_errors(
    blocks: ScoreBlocks,
    block: ScoreBlock,
    scores: ScoreErrors,
    p: Float64,
    precision: WeightPrecision,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
    range_log2: int,
) -> _BlockErrors:
    def as_read(size: Float64, error: Float64, tiny: float) -> Float64:
        error = error + precision.u_in * (size + error) + tiny
        return np.where(scores.visible, error, 0.0)

    block_lse = np.asarray(lse[block.at], np.float64)
    shift_error = U32 * (2 * precision.exponent_shift + 8)
    ds_score = scores.dot * scores.reach + U32 * scores.magnitude + scores.softcap
    # fmin: 0 times the expm1 of a large error, which is infinite, is NaN.
    p_error = np.fmin(
        p * np.expm1(exponent_error(ds_score, block_lse) + shift_error), np.maximum(p, 1 - p)
    )
    p_error += precision.tiny_in

    kept = np.ones(p.shape) if block.kept is None else block.kept
    block_dout = block.rows_of(dout)
    delta = row_delta(block, dout, out, dlse)
    delta_size = np.abs(block_dout * block.rows_of(out)).sum(axis=-1)
    if dlse is not None:
        delta_size = delta_size + np.abs(np.asarray(dlse[block.at], np.float64))
    g = kept * (block_dout @ block.v.T) - delta[:, None]
    g_size = kept * (np.abs(block_dout) @ np.abs(block.v).T) + delta_size[:, None]
    terms = block.v.shape[-1] + 2
    g_error = sum_error(terms, g_size)
    tiny_ds = precision.tiny_in * 2.0**range_log2
    if range_log2:
        abs_sums = (np.abs(x).sum(axis=-1) for x in (block_dout, block.v))
        g_error = g_error + tiny_ds * kept * np.add.outer(*abs_sums)

    ds = np.where(scores.visible, p * np.abs(g), 0.0)
    ds_error = (p + p_error) * g_error + p_error * np.abs(g) + 2 * U32 * ds
    ds_error = np.where(scores.visible, ds_error, 0.0)
    dbias, dbias_error = ds, ds_error
    if block.slope is not None and blocks.softcap:
        slope_error = 2 * (EPS_TANH + 2 * scores.dot * scores.reach / blocks.softcap) + 4 * U32
        ds_error = ds_error * (block.slope + slope_error) + ds * slope_error
        ds = ds * block.slope

    sink_size = sink_error = 0.0
    sink = blocks.sink(block.h)
    if sink is not None:
        sink_p = probabilities(np.full((len(delta), 1), sink), block_lse)[:, 0]
        sink_error_of_score = U32 * sink_magnitude(sink, block_lse)[:, None]
        sink_exponent = exponent_error(sink_error_of_score, block_lse)[:, 0] + shift_error
        sink_p_error = np.fmin(sink_p * np.expm1(sink_exponent), np.maximum(sink_p, 1 - sink_p))
        sink_p_error += TINY32
        sink_error = float(
            ((sink_p + sink_p_error) * sum_error(terms, delta_size)).sum()
            + (sink_p_error * np.abs(delta)).sum()
        )
        sink_size = float((sink_p * np.abs(delta)).sum())

    tiny_ds /= min(1.0, abs(blocks.scale) or 1.0)
    return _BlockErrors(
        p=p * kept,
        p_error=as_read(p * kept, p_error * kept, precision.tiny_in),
        dbias=dbias,
        dbias_error=dbias_error,
        ds=ds,
        ds_error=as_read(ds, ds_error, tiny_ds),
        sink=sink_size,
        sink_error=sink_error,
    )


def range_log2(
    blocks: ScoreBlocks,
    dout: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    dlse: NDArray[Any] | None,
) -> NDArray[np.int64]:
    """Return the k, (B, G), that keeps |dS| <= |dP| + |delta| within 2**(15 + k).

    That is at most max |dout_i| max |v_j| / (1 - dropout_p) + max |delta_i|, of the rows that are
    finite, and of queries that see a key. Where that is next to a power of two kernels may find one
    less.
    """
    batch, kv_heads = lse.shape[0], blocks.k.shape[2]

    def largest(x: Float64) -> Float64:
        finite = np.where(np.isfinite(x), np.abs(x), 0.0)
        return finite.reshape(batch, kv_heads, -1).max(axis=-1, initial=0.0)

    with np.errstate(invalid="ignore", over="ignore"):
        douts, outs, values = (np.asarray(x, np.float64) for x in (dout, out, blocks.v))
        in_use = np.arange(values.shape[1]) < blocks.used[:, None]
        norms = np.where(in_use[..., None], np.linalg.norm(values, axis=-1), 0.0)
        delta = (douts * outs).sum(axis=-1).swapaxes(1, 2)
        if dlse is not None:
            delta = delta - dlse
        rows = np.linalg.norm(douts, axis=-1).swapaxes(1, 2)
        rows, delta = (np.where(np.isneginf(lse), 0.0, x) for x in (rows, delta))
        dp = largest(rows) * largest(norms.swapaxes(1, 2))
        bound = dp / (1 - blocks.dropout_p) + largest(delta)
    exponents = np.frexp(bound * (1 + 2.0**-16))[1] - _MOST_LOG2
    return np.clip(exponents, 0, _MOST_RANGE_LOG2)


def attention_backward_bound(
    dout: NDArray[Any],
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    out: NDArray[Any],
    lse: NDArray[Any],
    /,
    *,
    dtype: DTypeLike,
    dlse: NDArray[Any] | None = None,
    float32_weights: bool = False,
    native: bool = False,
    **options: Any,
) -> AttentionGrads:
    """Error bounds of attention_backward's results; the module's docstring has the derivation.

    Parameters
    ----------
    dout, q, k, v, out, lse, dlse, **options
        As in `attention_backward`, exactly as the kernel gets them: rounded.
    dtype : dtype or str
        The kernel's: float16, float32 or bfloat16.
    float32_weights : bool
        The kernel keeps P and dS in float32, whatever the dtype.
    native : bool
        The kernel is one of sm_80 or later, which keeps P and dS of bfloat16 calls in bfloat16.

    Returns
    -------
    AttentionGrads of float64 arrays

    Raises
    ------
    ValueError
        If there are no bounds for the dtype.
    """
    precision = WeightPrecision.of(dtype, float32_weights=float32_weights, native=native)
    grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    blocks = ScoreBlocks(q, k, v, **options)
    scale = abs(blocks.scale)
    operand = 0.0 if blocks.rotary is None else precision.u_out + ROTATION
    log2 = np.zeros(k.shape[::2], int)
    if precision.exponent_shift:  # on tensor cores
        log2 = range_log2(blocks, dout, out, lse, dlse)
    dq_bound = np.zeros(q.shape)
    dk_sum, dv_sum = (_Sum.zeros(x.shape, (*x.shape[:3], 1)) for x in (k, v))
    dbias_sum = None if grads.dbias is None else _Sum.zeros(grads.dbias.shape)
    dsinks_sum = None if grads.dsinks is None else _Sum.zeros(grads.dsinks.shape)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for block in blocks:
            block_lse = np.asarray(lse[block.at], np.float64)
            p = probabilities(block.scores, block_lse)
            scores = ScoreErrors.of(blocks, block, block_lse, precision)
            rows = dout, out, lse, dlse
            x = _block_errors(blocks, block, scores, p, precision, *rows, log2[block.b, block.g])
            size = x.ds @ scores.k
            error = x.ds_error @ scores.k + operand * size
            terms = scores.visible.sum(axis=1, keepdims=True)
            dq_bound[block.b, block.rows, block.h] = scale * (error + sum_error(terms, size))
            keys = block.b, block.keys, block.g
            terms = scores.visible.sum(axis=0)[:, None]
            size = x.ds.T @ scores.q
            dk_sum.add(keys, size, x.ds_error.T @ scores.q + operand * size, terms)
            abs_dout = np.abs(block.rows_of(dout))
            dv_sum.add(keys, x.p.T @ abs_dout, x.p_error.T @ abs_dout, terms)
            if dbias_sum is not None:
                dbias_sum.add_broadcast(block, x.dbias, x.dbias_error, scores.visible)
            if dsinks_sum is not None:
                dsinks_sum.add((block.h,), x.sink, x.sink_error, block.rows.stop - block.rows.start)
        dk_bound = scale * dk_sum.bound()
        _rotate_bounds(blocks, grads, dq_bound, dk_bound, precision)
        dq, dk, dv, dbias, dsinks = cast("tuple[Float64, ...]", grads)
        return AttentionGrads(
            dq_bound + precision.store(dq),
            dk_bound + precision.store(dk),
            dv_sum.bound() + precision.store(dv),
            _stored(dbias_sum, dbias, blocks.bias),
            _stored(dsinks_sum, dsinks, blocks.sinks),
        )


def _rotate_bounds(
    blocks: ScoreBlocks,
    grads: AttentionGrads,
    dq_bound: Float64,
    dk_bound: Float64,
    precision: Precision,
) -> None:
    """Bound the errors of gradients of rotated q and k after the inverse rotation, in place."""
    if blocks.rotary is None:
        return
    pairs = pairs_of(blocks.rotary[0].shape[-1], interleaved=blocks.interleaved)
    for b, used in enumerate(blocks.used):
        of_queries = blocks.angles(b, np.arange(dq_bound.shape[1]))
        for bound, grad, angles in (
            (dq_bound[b], grads.dq[b], of_queries),
            (dk_bound[b, :used], grads.dk[b, :used], blocks.angles(b)),
        ):
            length = np.hypot(*angles)
            bound[...] = pair_norms(bound + precision.tiny_out, pairs)
            for features in pairs:
                bound[..., features] *= length[:, None, :]
            bound += (precision.u_out + ROTATION) * pair_norms(grad, pairs)


def _stored(total: _Sum | None, grad: Float64 | None, given: Any) -> Float64 | None:
    """Add the error of the store, in the dtype of the input whose gradient it is."""
    if total is None or grad is None:
        return None
    name = np.asarray(given).dtype.name
    return total.bound() + precision_of("float32" if name == "float64" else name).store(grad)
