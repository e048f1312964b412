"""bounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.activations.reference import (
    _FLUSHED,
    _stored,
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


def activation_error(x: ArrayLike, kind: str) -> Float64:
    """Bound of what a kernel's float32 activation errs by, before it is stored."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p, rest, _, g = probability(x, kind)
        x = np.asarray(x, dtype=np.float64)
        value = _times(x, p)
        tail = np.where(np.minimum(p, rest) == 0, 0.0, np.abs(x) * np.minimum(p, rest) * g)
        return U32 * (tail + 5 * np.abs(value)) + _FLUSHED


def derivative_error(x: ArrayLike, kind: str) -> Float64:
    """Bound of what a kernel's float32 derivative errs by, before it is stored."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        p, rest, slope, g = probability(x, kind)
        x = np.asarray(x, dtype=np.float64)
        tail = np.where(np.minimum(p, rest) == 0, 0.0, np.minimum(p, rest) * g)
        change = np.where(slope == 0, 0.0, np.abs(x * slope) * (g + 13))
        return U32 * (tail + 5 * p + change) + _FLUSHED


def activation_bound(x: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Error bound of `activation`, of a kernel that rounds to dtype."""
    return _stored(activation(x, kind), activation_error(x, kind), dtype)


def activation_backward_bound(
    dout: ArrayLike, x: ArrayLike, kind: str, *, dtype: DTypeLike, present: ArrayLike = 0.0
) -> Float64:
    """Error bound of `activation_backward`; `present` is what the gradient is added to."""
    dout, present = np.asarray(dout, np.float64), np.asarray(present, np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        exact = activation_backward(dout, x, kind)
        error = np.abs(dout) * derivative_error(x, kind) + U32 * (2 * np.abs(exact) + abs(present))
    return _stored(exact + present, error, dtype)


def gated_bound(gate: ArrayLike, up: ArrayLike, kind: str, *, dtype: DTypeLike) -> Float64:
    """Error bound of `gated`."""
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
    """Error bounds of `gated_backward`; `present` is what the gradients are added to."""
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
    """Error bound of `dropout`: the scale and the product are rounded, and the sum."""
    exact = dropout(x, p, seed, residual)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = 2 * np.abs(dropout(x, p, seed)) + np.abs(exact)
        return U32 * terms + precision_of(dtype).store(exact) + TINY32


def add_to_bound(total: ArrayLike, x: ArrayLike) -> Float64:
    """Error bound of `add_to`: the sum is rounded to float32 once."""
    return precision_of("float32").store(add_to(total, x))
