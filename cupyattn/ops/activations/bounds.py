"""Error bounds of activations, gated activations, dropout and add_to: kernels and NumPy arrays.

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

NumPy arrays of float32 (`cupyattn.ops.activations.cpu`), with E = 6 u32 the error of NumPy's
exponential (3 units in the last place):

- silu is x / (1 + t) with t = exp(-x), whose exponent is exact: the value errs by |x p| ((1 - p) E
  + 3 u32). gelu_tanh has an exponent z that errs by 5 u32 |z| (two constants, five operations): E +
  5 u32 |z| takes the place of E.
- gelu is max(x, 0) - |x| q. The second term is computed in float64, from a q that errs by 0.11 u32,
  and rounded: 1.2 u32 |x| q. The difference errs by u32 |x p|.
- The derivative of gelu is computed in float64 and rounded: 0.2 u32 (q + |x p'|) and u32 of it.
- Other derivatives are p + x p' with p = 1 / (1 + t) and p' = t p^2 z'. p errs by p ((1 - p) E +
  2 u32), and x p' by |x p'| (E + 10 u32): two p, three products, and up to three roundings of z'.
  The sum errs by u32 of it. Exponents are at least -88, and values are 0 where t overflows, which
  is off by at most 2**-118.
- Of 16-bit arrays, values and derivatives are rounded once, to float32 if they are multiplied.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.activations.reference import (
    _LARGEST,
    _times,
    activation,
    activation_backward,
    activation_derivative,
    add_to,
    dropout,
    gated,
    gated_backward,
    probability,
)
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of

_LINEAR = 2 * math.sqrt(2 / math.pi)
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


def _cpu_value_error(x: ArrayLike, kind: str, dtype: DTypeLike) -> Float64:
    """Return the error of an activation in float32, before it is multiplied or stored."""
    p, rest, _, _ = probability(x, kind)
    size = np.abs(activation(x, kind))
    if precision_of(dtype).u_out > U32 or kind == "relu":
        return U32 * size
    if kind == "gelu":
        tail = np.minimum(np.abs(np.asarray(x, np.float64)), _LARGEST) * np.minimum(p, rest)
        return U32 * (1.2 * tail + size) + _FLUSHED
    return U32 * size * (rest * _cpu_exponential_error(x, kind) + 3) + _FLUSHED


def _cpu_derivative_error(x: ArrayLike, kind: str, dtype: DTypeLike) -> Float64:
    """Return the error of a derivative in float32, before it is multiplied or stored."""
    p, rest, slope, _ = probability(x, kind)
    size = np.abs(activation_derivative(x, kind))
    change = np.abs(np.clip(np.asarray(x, np.float64), -_LARGEST, _LARGEST) * slope)
    if precision_of(dtype).u_out > U32 or kind == "relu":
        return U32 * size
    if kind == "gelu":
        return U32 * (0.2 * (np.minimum(p, rest) + change) + size) + _FLUSHED
    growth = _cpu_exponential_error(x, kind)
    error = p * (rest * growth + 2) + change * (growth + 10) + size
    return U32 * error + _FLUSHED


def _cpu_exponential_error(x: ArrayLike, kind: str) -> Float64:
    """Return the relative error of exp(-|z|) in units of 2**-24; at most that of z = 128."""
    x = np.abs(np.asarray(x, np.float64))
    z = x * _LINEAR * (1 + 0.044715 * x * x) if kind == "gelu_tanh" else np.zeros_like(x)
    return 6 + 5 * np.minimum(z, 128)


def cpu_activation_bound(x: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Return the error bound of `activation` on NumPy arrays."""
    precision = precision_of(dtype)
    with np.errstate(all="ignore"):
        exact = activation(x, kind)
        if precision.u_out > U32:
            return precision.store(exact)
        return _cpu_value_error(x, kind, dtype) + TINY32


def cpu_activation_backward_bound(
    dout: ArrayLike, x: ArrayLike, kind: str, *, dtype: DTypeLike
) -> Float64:
    """Return the error bound of `activation_backward` on NumPy arrays."""
    with np.errstate(all="ignore"):
        exact = activation_backward(dout, x, kind)
        error = np.abs(np.asarray(dout, np.float64)) * _cpu_derivative_error(x, kind, dtype)
        return _cpu_stored(exact, error, 1, dtype)


def cpu_gated_bound(gate: ArrayLike, up: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Return the error bound of `gated` on NumPy arrays."""
    with np.errstate(all="ignore"):
        exact = gated(gate, up, kind)
        error = np.abs(np.asarray(up, np.float64)) * _cpu_value_error(gate, kind, dtype)
        return _cpu_stored(exact, error, 1, dtype)


def cpu_gated_backward_bound(
    dout: ArrayLike, gate: ArrayLike, up: ArrayLike, kind: str, *, dtype: DTypeLike
) -> tuple[Float64, Float64]:
    """Return the error bounds of `gated_backward` on NumPy arrays."""
    size, up = np.abs(np.asarray(dout, np.float64)), np.abs(np.asarray(up, np.float64))
    with np.errstate(all="ignore"):
        dgate, dup = gated_backward(size, gate, up, kind)
        of_gate = size * up * _cpu_derivative_error(gate, kind, dtype) + TINY32 * np.maximum(up, 1)
        of_up = size * _cpu_value_error(gate, kind, dtype)
        return _cpu_stored(dgate, of_gate, 2, dtype), _cpu_stored(dup, of_up, 1, dtype)


def _cpu_stored(exact: Float64, error: Float64, products: int, dtype: DTypeLike) -> Float64:
    """Return the bound of a stored result, from the error of its factors."""
    size = np.abs(exact) + error
    return error + U32 * products * size + TINY32 + precision_of(dtype).store(size)
