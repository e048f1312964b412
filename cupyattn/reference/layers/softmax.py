"""Softmax over the last axis, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ITEMS_PER_BLOCK = 2**18  # float64 intermediates of 2 MiB


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
    return _by_rows(_softmax, np.asarray(x))


def _softmax(x: NDArray[Any]) -> NDArray[np.float64]:
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
    return _by_rows(_softmax_backward, np.asarray(dout), np.asarray(out))


def _softmax_backward(dout: NDArray[Any], out: NDArray[Any]) -> NDArray[np.float64]:
    dout, out = np.asarray(dout, dtype=np.float64), np.asarray(out, dtype=np.float64)
    with np.errstate(invalid="ignore", under="ignore", over="ignore"):
        product: NDArray[Any] = dout * out
        result: NDArray[np.float64] = product - out * product.sum(axis=-1, keepdims=True)
    return result


def _by_rows(
    function: Callable[..., NDArray[np.float64]], *arrays: NDArray[Any]
) -> NDArray[np.float64]:
    """Apply a function of whole rows to blocks of the first axis, to keep intermediates small."""
    shape = arrays[0].shape
    if len(shape) < 2 or arrays[0].size <= _ITEMS_PER_BLOCK:
        return function(*arrays)
    result = np.empty(shape)
    step = max(1, _ITEMS_PER_BLOCK * shape[0] // arrays[0].size)
    for first in range(0, shape[0], step):
        block = slice(first, first + step)
        result[block] = function(*(array[block] for array in arrays))
    return result
