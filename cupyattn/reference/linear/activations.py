"""Activations and their derivatives in float64, and bounds of the float32 kernels' errors."""

from __future__ import annotations

import math

import numpy as np

_TWICE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Return Phi(x) = erfc(-x / sqrt(2)) / 2, to the last digits at either end.

    Examples
    --------
    >>> normal_cdf(np.array([-1.0, 0.0, 1.0])).round(4)
    array([0.1587, 0.5   , 0.8413])
    """
    flat = (x * -math.sqrt(0.5)).ravel().tolist()
    return 0.5 * np.fromiter(map(math.erfc, flat), np.float64, len(flat)).reshape(x.shape)


def normal_density(x: np.ndarray) -> np.ndarray:
    """Return Phi'(x) = exp(-x^2 / 2) / sqrt(2 pi)."""
    with np.errstate(under="ignore", over="ignore"):
        return np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def activation(name: str | None, x: np.ndarray) -> np.ndarray:
    """Return f(x), f being "gelu", "gelu_tanh", "silu", "relu" or None for x itself.

    Floats keep their dtype. The value at -inf is 0, the limit.

    Examples
    --------
    >>> activation("silu", np.array([0.0, np.log(3.0)])) / np.log(3.0)
    array([0.  , 0.75])
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        finite = np.maximum(x, np.finfo(x.dtype).min)  # times a probability of 0
        if name == "gelu":
            return finite * normal_cdf(x).astype(x.dtype)
        if name == "gelu_tanh":
            return finite * sigmoid(gelu_tanh_logit(x))
        if name == "silu":
            return finite * sigmoid(x)
        if name == "relu":
            return np.where(x < 0, 0, x).astype(x.dtype)
        return x


def activation_slope(name: str | None, x: np.ndarray) -> np.ndarray:
    """Return f'(x). It is 0 at -inf and 1 at inf; relu's is 0 at 0.

    Examples
    --------
    >>> activation_slope("relu", np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 1.])
    """
    held = np.clip(x, -1e3, 1e3)  # beyond, the slopes are constant
    with np.errstate(over="ignore", under="ignore"):
        if name == "gelu":
            return (normal_cdf(held) + held * normal_density(held)).astype(x.dtype)
        if name == "gelu_tanh":
            s = sigmoid(gelu_tanh_logit(held))
            return s + held * s * (1 - s) * gelu_tanh_logit_slope(held)
        if name == "silu":
            s = sigmoid(held)
            return s + held * s * (1 - s)
        if name == "relu":
            return np.where(x <= 0, 0, np.where(np.isnan(x), x, 1)).astype(x.dtype)
        return np.ones_like(x)


def gelu_tanh_logit(x: np.ndarray) -> np.ndarray:
    """Return 2 sqrt(2/pi) (x + 0.044715 x^3): gelu_tanh is x times its sigmoid."""
    return _TWICE * x * (1 + _CUBIC * x * x)


def gelu_tanh_logit_slope(x: np.ndarray) -> np.ndarray:
    """Return the derivative of `gelu_tanh_logit`."""
    return _TWICE * (1 + 3 * _CUBIC * x * x)
