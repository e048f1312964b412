"""Error bounds of the kernels of activations, gated activations, dropout and add_to.

An activation is x p(x) (`cupyattn.ops.activations.reference`). The kernels compute q = min(p, 1 -
p) and 1 - q. With u32 = 2**-24:

- silu and the tanh form compute t = exp(-|z|) by ex2.approx (2 ulp, 4 u32). Its exponent is off by
  2 u32 |z| (log2 e and the product are rounded), and in the tanh form by 5 u32 |z| more (two
  constants, five operations). Then q = t / (1 + t), computed by rcp.approx (1 ulp, 2 u32), has a
  relative error of g u32, with g = 8 + 2 |z| or 8 + 7 |z|, and 1 - q of q (4 + 2 |z|) + 3.
- Phi is e^(-x^2/2) R(|x|), with R(a) = s P(s) and s = 1 / (1 + c a). Relative errors in u32:
  1.5 x^2 of the exponent, 4 of the exponential, 4 of s, which R multiplies by at most 2.6; 2 of the
  polynomial's fit and 7 * 1.7 of its seven steps, whose terms are 1.7 times their sum; 2 of two
  products. So g = 31 + 1.5 x^2 for q, and one more for 1 - q.
- |value - x p| <= u32 (|x| q g + 5 |x p|).
- p' is q (1 - q) z', or the density e^(-x^2/2) / sqrt(2 pi): its relative error is at most (g + 12)
  u32. The derivative p + x p' is off by u32 (q g + 5 p + |x p'| (g + 13)), with its rounding.
- Numbers below 2**-126 are flushed to 0. The reference flushes them too, except in float64, so that
  products with an infinity are NaN in both. A value or derivative is off by at most 2**-118 by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.activations.reference import (
    _times,
    activation,
    activation_backward,
    add_to,
    dropout,
    gated,
    gated_backward,
    probability,
)
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of

_FLUSHED = 2.0**-118
"""How far a value or derivative may be off because small numbers are flushed to 0."""


def _stored(exact: Float64, error: Float64, dtype: DTypeLike) -> Float64:
    """Return the bound of a stored result, from that of its float32 value."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return error + precision_of(dtype).store(np.abs(exact) + error) + TINY32


def activation_error(x: ArrayLike, kind: str) -> Float64:
    """Return the error bound of a kernel's float32 activation, before it is stored."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p, rest, _, g = probability(x, kind)
        x = np.asarray(x, dtype=np.float64)
        value = _times(x, p)
        tail = np.where(np.minimum(p, rest) == 0, 0.0, np.abs(x) * np.minimum(p, rest) * g)
        return U32 * (tail + 5 * np.abs(value)) + _FLUSHED


def derivative_error(x: ArrayLike, kind: str) -> Float64:
    """Return the error bound of a kernel's float32 derivative, before it is stored."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p, rest, slope, g = probability(x, kind)
        x = np.asarray(x, dtype=np.float64)
        tail = np.where(np.minimum(p, rest) == 0, 0.0, np.minimum(p, rest) * g)
        change = np.where(slope == 0, 0.0, np.abs(x * slope) * (g + 13))
        return U32 * (tail + 5 * p + change) + _FLUSHED


def activation_bound(x: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Return the error bound of `activation` for a kernel that rounds to dtype."""
    return _stored(activation(x, kind), activation_error(x, kind), dtype)


def activation_backward_bound(
    dout: ArrayLike, x: ArrayLike, kind: str, *, dtype: DTypeLike, present: ArrayLike = 0.0
) -> Float64:
    """Return the error bound of `activation_backward`; the gradient is added to `present`."""
    dout, present = np.asarray(dout, np.float64), np.asarray(present, np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        exact = activation_backward(dout, x, kind)
        error = np.abs(dout) * derivative_error(x, kind) + U32 * (2 * np.abs(exact) + abs(present))
    return _stored(exact + present, error, dtype)


def gated_bound(gate: ArrayLike, up: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Return the error bound of `gated`."""
    up = np.asarray(up, np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        exact = gated(gate, up, kind)
        error = np.abs(up) * activation_error(gate, kind) + U32 * np.abs(exact)
    return _stored(exact, error, dtype)


def gated_backward_bound(
    dout: ArrayLike,
    gate: ArrayLike,
    up: ArrayLike,
    kind: str,
    *,
    dtype: DTypeLike,
    present: tuple[ArrayLike, ArrayLike] = (0.0, 0.0),
) -> tuple[Float64, Float64]:
    """Return the error bounds of `gated_backward`; the gradients are added to `present`."""
    dout, up = np.asarray(dout, np.float64), np.asarray(up, np.float64)
    there = [np.asarray(each, np.float64) for each in present]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        dgate, dup = gated_backward(dout, gate, up, kind)
        errors = (
            np.abs(dout * up) * derivative_error(gate, kind),
            np.abs(dout) * activation_error(gate, kind),
        )
        first, second = (
            _stored(exact + old, error + U32 * (3 * np.abs(exact) + np.abs(old)), dtype)
            for exact, error, old in zip((dgate, dup), errors, there, strict=True)
        )
    return first, second


def dropout_bound(
    x: ArrayLike, p: float, seed: int, residual: ArrayLike | None = None, *, dtype: DTypeLike
) -> Float64:
    """Return the error bound of `dropout`: the scale, the product and the sum are rounded."""
    exact = dropout(x, p, seed, residual)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = 2 * np.abs(dropout(x, p, seed)) + np.abs(exact)
        return U32 * terms + precision_of(dtype).store(exact) + TINY32


def add_to_bound(total: ArrayLike, x: ArrayLike) -> Float64:
    """Return the error bound of `add_to`: the sum is rounded to float32 once."""
    return precision_of("float32").store(add_to(total, x))
