"""Error bounds of the kernels of softmax, log-softmax and log-sum-exp, for every element.

Letters as in `attention.bounds`: u = 2**-24 is the unit round-off of float32, a sum of n terms errs
by n u times the sum of their absolute values, and `store` is the rounding of the result.

A score s = scale x + bias errs by d = 2 u (|scale x| + |bias|): the scale is rounded to float32,
and the sum once. s - m and its conversion to base 2 round by at most 4 u (|s| + |m|); the sum of
both errors is e. The value of m does not matter, since it cancels. Each exponential (ex2.approx)
has a relative error of 4 u; a weight is one exponential, or the product of two, one of them with
the thread's own maximum.

    softmax      out (e + mean(e) + (n + 24) u) + flushed + store
    log_softmax  e + mean(e) + (n + 24) u + 8 u (1 + |log l|) + u |out| + store
    logsumexp    mean(e) + (n + 24) u + 8 u (1 + |log l|) + 4 u |out|

mean(e) is the mean weighted by the weights: the relative error of l. log l = lse - m, for which
lg2.approx has a relative error of 2**-22 and an absolute error of 2**-22. A row of -inf is exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.softmax.reference import (
    Float64,
    broadcast_sums,
    kept_columns,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    scores,
    softmax,
    softmax_backward,
)
from cupyattn.runtime.precision import TINY32, U32, precision_of

QUIET: dict[str, Any] = {"invalid": "ignore", "under": "ignore", "over": "ignore"}


class _Errors(NamedTuple):
    """Error bounds of the scores of a call and of their sums, in the letters of the module."""

    score: Float64
    """d."""
    exponent: Float64
    """e."""
    total: Float64
    """Relative error of the sum l, (..., 1)."""
    log_total: Float64
    """Error of log l, (..., 1)."""


def _errors(x: ArrayLike, options: dict[str, Any]) -> _Errors:
    x = np.asarray(x, dtype=np.float64)
    scale, bias = options.get("scale", 1.0), options.get("bias")
    kept = kept_columns(x.shape, options.get("mask"), options.get("causal", False))
    s = scores(x, scale, kept, bias)
    magnitude = np.abs(scale * x) + (0.0 if bias is None else np.abs(np.asarray(bias, np.float64)))
    largest = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    counts = ~np.isneginf(s)
    plain = scale == 1 and bias is None
    score = np.where(counts & (not plain), 2 * U32 * magnitude, 0.0)
    exponent = score + np.where(counts, 4 * U32 * (np.abs(s) + np.abs(largest)), 0.0)
    mean = (softmax(x, **options) * exponent).sum(axis=-1, keepdims=True)
    total = mean + (x.shape[-1] + 24) * U32
    log_l = np.where(np.isneginf(largest), 0.0, logsumexp(x, **options)[..., None] - largest)
    return _Errors(score, exponent, total, total + 8 * U32 * (1 + np.abs(log_l)))


def softmax_bound(x: ArrayLike, *, dtype: DTypeLike, **options: Any) -> Float64:
    """Return the error bound of `softmax`.

    Parameters
    ----------
    x : (..., N) floats
        Already rounded to dtype.
    dtype : dtype or str
        The dtype of the result: float16, float32 or bfloat16.
    **options
        Options of `softmax`.

    Returns
    -------
    (..., N) float64
    """
    with np.errstate(**QUIET):
        out, errors = softmax(x, **options), _errors(x, options)
        bound: Float64 = (errors.exponent + errors.total) * out + 2 * TINY32
        return bound + precision_of(dtype).store(out)


def log_softmax_bound(x: ArrayLike, *, dtype: DTypeLike, **options: Any) -> Float64:
    """Return the error bound of `log_softmax`, 0 where the result is -inf.

    Parameters as for `softmax_bound`.
    """
    with np.errstate(**QUIET):
        out, errors = log_softmax(x, **options), _errors(x, options)
        size = np.where(np.isneginf(out), 0.0, np.abs(out))
        error = errors.exponent + errors.log_total + U32 * size
        return np.where(np.isneginf(out), 0.0, error + precision_of(dtype).store(size))


def log_sum_bound(x: ArrayLike, **options: Any) -> Float64:
    """Return the error bound (...) of log l, the log-sum-exp minus the largest score."""
    with np.errstate(**QUIET):
        return _errors(x, options).log_total[..., 0]


def logsumexp_bound(x: ArrayLike, **options: Any) -> Float64:
    """Return the error bound (...) of `logsumexp` in float32. Parameters as for `softmax_bound`."""
    with np.errstate(**QUIET):
        out, errors = logsumexp(x, **options), _errors(x, options)
        size = np.where(np.isneginf(out), 0.0, np.abs(out))
        return np.where(np.isneginf(out), 0.0, errors.log_total[..., 0] + 4 * U32 * size)


def softmax_backward_bound(
    dout: ArrayLike, out: ArrayLike, *, dtype: DTypeLike, scale: float = 1.0
) -> Float64:
    """Return the error bound of `softmax_backward`, scale out (dout - delta).

    delta = sum(dout * out) errs by (n + 1) u sum|dout * out| and n flushed products. The difference
    and the products round three times more, and the scale once.

    Parameters
    ----------
    dout, out : (..., N) floats
        Already rounded to dtype.
    dtype : dtype or str
        The dtype of the result: float16, float32 or bfloat16.
    scale : float
        That of `softmax_backward`.

    Returns
    -------
    (..., N) float64
    """
    dout, out = np.asarray(dout, dtype=np.float64), np.asarray(out, dtype=np.float64)
    n = out.shape[-1]
    with np.errstate(**QUIET):
        total = np.abs(dout * out).sum(axis=-1, keepdims=True)
        error = (n + 1) * U32 * total + n * TINY32 + 6 * U32 * (np.abs(dout) + total)
        flushed = TINY32 * (1 + np.abs(out)) * max(abs(scale), 1.0)
        store = precision_of(dtype).store(softmax_backward(dout, out, scale=scale))
        bound: Float64 = abs(scale) * np.abs(out) * error + flushed + store
    return bound


def log_softmax_backward_bound(
    dout: ArrayLike, out: ArrayLike, *, dtype: DTypeLike, scale: float = 1.0
) -> Float64:
    """Return the error bound of `log_softmax_backward`, scale (dout - exp(out) total).

    The total errs by n u sum|dout|; the exponential has a relative error of 4 u |out| + 4 u.
    Parameters as for `softmax_backward_bound`.
    """
    dout, out = np.asarray(dout, dtype=np.float64), np.asarray(out, dtype=np.float64)
    hidden = np.isneginf(out)
    with np.errstate(**QUIET):
        dout, size = np.where(hidden, 0.0, dout), np.where(hidden, 0.0, np.abs(out))
        p, total = np.exp(out), np.abs(dout).sum(axis=-1, keepdims=True)
        error = p * total * U32 * (out.shape[-1] + 4 * size + 8) + 4 * U32 * np.abs(dout)
        flushed = TINY32 * (1 + total) * max(abs(scale), 1.0)
        store = precision_of(dtype).store(log_softmax_backward(dout, out, scale=scale))
        bound: Float64 = np.where(hidden, 0.0, abs(scale) * error + flushed + store)
    return bound


def broadcast_sums_bound(
    gradient: ArrayLike, error: ArrayLike, shape: tuple[int, ...], *, dtype: DTypeLike
) -> Float64:
    """Return the error bound of `broadcast_sums`, rounded to dtype, for terms that err by `error`.

    n terms are added in float32 in any order: n u sum|gradient|, and u more for the errors.
    """
    gradient, error = np.asarray(gradient, np.float64), np.asarray(error, np.float64)
    with np.errstate(**QUIET):
        exact = broadcast_sums(gradient, shape)
        terms = gradient.size // max(exact.size, 1)
        size = broadcast_sums(np.abs(gradient) + error, shape)
        summed = broadcast_sums(error, shape) + (terms + 1) * U32 * size
        bound: Float64 = summed + precision_of(dtype).store(np.abs(exact) + summed)
    return bound


def weight_error(weight: Float64, exponent_error: Float64) -> Float64:
    """Return the error of a weight exp(s - lse), at most 1, from the error of its exponent."""
    # fmin, because 0 * expm1(a large error) is 0 * infinity, which is NaN.
    error = np.fmin(weight * np.expm1(exponent_error), np.maximum(weight, 1 - weight))
    return error


def logsumexp_backward_bound(
    dout: ArrayLike, x: ArrayLike, out: ArrayLike, *, dtype: DTypeLike, **options: Any
) -> Float64:
    """Return the error bound of `logsumexp_backward`, scale dout exp(s - out), given out.

    The exponent errs by d + 4 u (|s| + |out|), including the rounding of out to float32. The
    exponential and the products have a relative error of 10 u. Parameters as for `softmax_bound`,
    with dout and out (...).
    """
    x = np.asarray(x, dtype=np.float64)
    given = np.asarray(out, np.float64)[..., None]
    with np.errstate(**QUIET):
        dx = logsumexp_backward(dout, x, out, **options)
        kept = kept_columns(x.shape, options.get("mask"), options.get("causal", False))
        s = scores(x, options.get("scale", 1.0), kept, options.get("bias"))
        exponent = _errors(x, options).score + 4 * U32 * (np.abs(s) + np.abs(given))
        exponent = np.where(np.isneginf(s), 0.0, exponent)
        factor = abs(options.get("scale", 1.0)) * np.abs(np.asarray(dout, np.float64))[..., None]
        weight = np.exp(np.minimum(s - np.where(np.isneginf(given), 0.0, given), 0.0))
        bound: Float64 = factor * weight_error(weight, exponent + 10 * U32) + TINY32 * (1 + factor)
        return np.where(np.isneginf(s), 0.0, bound + precision_of(dtype).store(dx))
