"""Activations, gated activations, dropout and sums in float64, with their gradients.

Each activation is x p(x) with a probability p: gelu(x) = x Phi(x) with the normal distribution
function Phi (Hendrycks and Gimpel, arXiv:1606.08415), its tanh form x / (1 + exp(-z)) with z = 2
sqrt(2/pi) (x + 0.044715 x^3) (ibid., section 2: (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))), and
silu(x) = x / (1 + exp(-x)) (ibid., section 4). The gated ones are Shazeer's, arXiv:2002.05202.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.philox import kept_fields
from cupyattn.runtime.precision import Float64

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_SMALLEST = 2.0**-126
_LARGEST = np.finfo(np.float64).max

_erfc = np.frompyfunc(math.erfc, 1, 1)


class Probability(NamedTuple):
    """p, 1 - p and p' at each x, and g: the relative error of min(p, 1 - p), in 2**-24."""

    p: Float64
    rest: Float64
    slope: Float64
    g: Float64


def probability(x: ArrayLike, activation: str) -> Probability:
    """Return the p of an activation x p(x): "gelu", "gelu_tanh", "silu" or "relu"."""
    least = _least(x)
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if activation == "gelu":
            p, rest = (_flushed(_erfc(sign * x / math.sqrt(2)) / 2, least) for sign in (-1, 1))
            density = _flushed(np.exp(-x * x / 2) / math.sqrt(2 * math.pi), least)
            return Probability(p, rest, density, 31 + 1.5 * x * x)
        if activation == "relu":
            p = np.where(np.isnan(x), x, x > 0)
            return Probability(p, 1 - p, np.zeros_like(x), np.zeros_like(x))
        z, dz, growth = x, np.ones_like(x), 2
        if activation == "gelu_tanh":
            z = 2 * _SQRT_2_OVER_PI * x * (1 + 0.044715 * x * x)
            dz = 2 * _SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x)
            growth = 7
        t = np.exp(-np.abs(z))
        larger, smaller = 1 / (1 + t), _flushed(t / (1 + t), least)
        p, rest = np.where(z > 0, (larger, smaller), (smaller, larger))
        slope = np.where(smaller == 0, 0.0, larger * smaller * dz)
        return Probability(p, rest, slope, 8 + growth * np.abs(z))


def _least(x: ArrayLike) -> float:
    """Return the size below which numbers are flushed that are computed from x."""
    return 0.0 if np.asarray(x).dtype == np.float64 else _SMALLEST


def _flushed(values: object, least: float) -> Float64:
    floats = np.asarray(values, dtype=np.float64)
    return floats * ~(np.abs(floats) < least)  # a product: zeros keep their sign


def _times(x: Float64, factor: Float64) -> Float64:
    """Return x * factor; 0 where the factor is 0, even if x is -inf: the limit."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.clip(x, -_LARGEST, np.inf) * factor


def activation(x: ArrayLike, kind: str) -> Float64:
    """Return "gelu", "gelu_tanh", "silu" or "relu" of x.

    Examples
    --------
    >>> activation([-np.inf, 0.0, 1.0], "gelu").round(4)
    array([-0.    ,  0.    ,  0.8413])
    """
    p = probability(x, kind).p
    return _flushed(_times(np.asarray(x, dtype=np.float64), p), _least(x))


def activation_derivative(x: ArrayLike, kind: str) -> Float64:
    """Return the derivative of an activation.

    Examples
    --------
    >>> activation_derivative([-np.inf, 0.0, np.inf], "silu")
    array([0. , 0.5, 1. ])
    """
    p = probability(x, kind)
    return p.p + np.clip(np.asarray(x, dtype=np.float64), -_LARGEST, _LARGEST) * p.slope


def activation_backward(dout: ArrayLike, x: ArrayLike, kind: str) -> Float64:
    """Return the gradient with respect to an activation's input."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return np.asarray(dout, dtype=np.float64) * activation_derivative(x, kind)


def gated(gate: ArrayLike, up: ArrayLike, kind: str) -> Float64:
    """Return the activation of gate, times up."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return activation(gate, kind) * np.asarray(up, dtype=np.float64)


def gated_backward(
    dout: ArrayLike, gate: ArrayLike, up: ArrayLike, kind: str
) -> tuple[Float64, Float64]:
    """Return the gradients with respect to gate and up."""
    dout, up = np.asarray(dout, dtype=np.float64), np.asarray(up, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return dout * up * activation_derivative(gate, kind), dout * activation(gate, kind)


def element_keep(seed: int, p: float, items: ArrayLike) -> NDArray[np.bool_]:
    """Return which items of an array `dropout` keeps.

    The key is the seed. The counter of item e, its index in C order, is (g % 2**32, g // 2**32, 0,
    2**31) with g = e // 8, so eight items share a counter. (No batch element of attention has the
    number 2**31.) The four words are eight 16-bit fields, low half first. Item e uses field e % 8
    and is kept if the field is at least round(65536 p).

    Parameters
    ----------
    seed : int in [0, 2**64)
    p : float in [0, 1)
        Probability of dropping an item.
    items : ints in [0, 2**63), of any shape
        Their indices in C order.

    Returns
    -------
    bool, of that shape
        True where the item is kept.

    Examples
    --------
    >>> element_keep(0, 0.5, np.arange(8)).astype(int)
    array([1, 1, 1, 1, 0, 1, 0, 0])
    """
    items = np.asarray(items, dtype=np.uint64)
    groups, of_item = np.unique(items // np.uint64(8), return_inverse=True)
    low, high = groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32)
    kept = kept_fields(seed, p, (low, high, 0, 2**31))
    return kept[(items % np.uint64(8)).astype(np.intp), of_item.reshape(items.shape)]


def dropout(x: ArrayLike, p: float, seed: int, residual: ArrayLike | None = None) -> Float64:
    """Return x / (1 - p) for items that are kept and 0 for the others, plus the residual.

    p is first rounded to a multiple of 1/65536; if that is 1, nothing is kept. The gradient with
    respect to x is ``dropout(dout, p, seed)``.

    Examples
    --------
    >>> dropout(np.arange(8.0), 0.5, 0)
    array([ 0.,  2.,  4.,  6.,  0., 10.,  0.,  0.])
    """
    x = np.asarray(x, dtype=np.float64)
    kept = (
        element_keep(seed, p, np.arange(x.size)).reshape(x.shape) if p else np.ones(x.shape, bool)
    )
    kept_share = 1 - round(65536 * p) / 65536  # as `element_keep` rounds p: the mean is x
    with np.errstate(over="ignore", invalid="ignore"):
        out: Float64 = np.where(kept, x / (kept_share or 1.0), 0.0)
        return out if residual is None else out + np.asarray(residual, dtype=np.float64)


def add_to(total: ArrayLike, x: ArrayLike) -> Float64:
    """Return total + x.

    Examples
    --------
    >>> add_to([1.0, 2.0], [0.5, 0.25])
    array([1.5 , 2.25])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(total, np.float64) + np.asarray(x, np.float64)
