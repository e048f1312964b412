"""Softmax over the last axis, and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def softmax(x: ArrayLike) -> NDArray[np.float64]:
    """exp(x) / sum(exp(x)) over the last axis.

    Parameters
    ----------
    x : (..., N) floats

    Returns
    -------
    (..., N) float64
        A row whose every entry is -inf gives 0; a row with a NaN or +inf gives NaN.

    Examples
    --------
    >>> softmax([0.0, float("-inf"), 0.0])
    array([0.5, 0. , 0.5])
    """
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(invalid="ignore", under="ignore", over="ignore"):
        m = np.max(x, axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(x - np.where(np.isneginf(m), 0.0, m))
        total = p.sum(axis=-1, keepdims=True)
        result: NDArray[np.float64] = p / np.where(total == 0, 1.0, total)
    return result


def softmax_backward(dout: ArrayLike, out: ArrayLike) -> NDArray[np.float64]:
    """Gradient of softmax's input: out * (dout - sum(dout * out)) over the last axis.

    Parameters
    ----------
    dout : (..., N) floats
        Gradient of the output.
    out : (..., N) floats
        The output of `softmax`, possibly rounded.

    Returns
    -------
    (..., N) float64
    """
    dout, out = np.asarray(dout, dtype=np.float64), np.asarray(out, dtype=np.float64)
    with np.errstate(invalid="ignore", under="ignore", over="ignore"):
        product: NDArray[Any] = dout * out
        result: NDArray[np.float64] = product - out * product.sum(axis=-1, keepdims=True)
    return result
