"""Softmax over the last axis, its logarithm, the log-sum-exp, and their gradients, in float64.

The scores are s = scale x + bias where a column is kept, and -inf elsewhere. Mask and bias
broadcast to x. With `causal` row i of an x (..., Sq, Sk) keeps column j if j <= i + Sk - Sq.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyattn.runtime.precision import Float64

_ITEMS_PER_BLOCK = 2**18  # float64 intermediates of 2 MiB


def softmax(
    x: ArrayLike,
    *,
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
) -> Float64:
    """Return exp(s) / sum(exp(s)) over the last axis.

    Parameters
    ----------
    x : (..., N) floats
    scale, mask, bias, causal
        See the module's docstring.

    Returns
    -------
    (..., N) float64
        A row whose scores are all -inf gives 0; a row with a NaN or +inf gives NaN.

    Examples
    --------
    >>> softmax([0.0, float("-inf"), 0.0])
    array([0.5, 0. , 0.5])
    >>> softmax(np.zeros((2, 2)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    return _of_scores(_softmax, x, scale, mask, bias, causal)


def log_softmax(
    x: ArrayLike,
    *,
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
) -> Float64:
    """Return s - log(sum(exp(s))) over the last axis; parameters as for `softmax`.

    Where `softmax` is 0 because nothing is kept, the result is -inf.

    Examples
    --------
    >>> log_softmax([0.0, float("-inf")])
    array([  0., -inf])
    """
    return _of_scores(_log_softmax, x, scale, mask, bias, causal)


def logsumexp(
    x: ArrayLike,
    *,
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
) -> Float64:
    """Return log(sum(exp(s))) over the last axis; parameters as for `softmax`.

    Returns
    -------
    (...) float64
        A row whose scores are all -inf gives -inf; a row with a NaN or +inf gives NaN.

    Examples
    --------
    >>> logsumexp([[0.0, 0.0], [float("-inf"), 1.0]])
    array([0.69314718, 1.        ])
    """
    return _of_scores(_logsumexp, x, scale, mask, bias, causal)


def softmax_backward(dout: ArrayLike, out: ArrayLike, *, scale: float = 1.0) -> Float64:
    """Return the gradient with respect to softmax's x: scale out (dout - sum(dout out)).

    Parameters
    ----------
    dout : (..., N) floats
        Gradient with respect to the output.
    out : (..., N) floats
        The output of `softmax`, possibly rounded. It contains the effect of mask and bias.
    scale : float
        The scale that `softmax` was given.

    Returns
    -------
    (..., N) float64
    """

    def gradient(dout: Float64, out: Float64) -> Float64:
        product = dout * out
        result: Float64 = scale * (product - out * product.sum(axis=-1, keepdims=True))
        return result

    return by_rows(gradient, _float64(dout), _float64(out))


def log_softmax_backward(dout: ArrayLike, out: ArrayLike, *, scale: float = 1.0) -> Float64:
    """Return the gradient with respect to log_softmax's x: scale (dout - exp(out) sum(dout)).

    Where out is -inf the gradient is 0 whatever dout is. Parameters as for `softmax_backward`.
    """

    def gradient(dout: Float64, out: Float64) -> Float64:
        hidden = np.isneginf(out)
        dout = np.where(hidden, 0.0, dout)
        total = dout.sum(axis=-1, keepdims=True)
        return np.where(hidden, 0.0, scale * (dout - np.exp(out) * total))

    return by_rows(gradient, _float64(dout), _float64(out))


def broadcast_sums(gradient: ArrayLike, shape: tuple[int, ...]) -> Float64:
    """Sum the gradient of scores over the axes that a bias of this shape broadcasts along.

    Along a row the sum is 0: adding one number to all scores of a row changes no weight.

    Examples
    --------
    >>> broadcast_sums([[1.0, -1.0], [2.0, -2.0]], (2,))
    array([ 3., -3.])
    >>> broadcast_sums([[1.0, -1.0], [2.0, -2.0]], (2, 1))
    array([[0.],
           [0.]])
    """
    gradient = _float64(gradient)
    extents = (1,) * (gradient.ndim - len(shape)) + shape
    if extents[-1] != gradient.shape[-1]:
        return np.zeros(shape)
    over = tuple(axis for axis, n in enumerate(extents) if n != gradient.shape[axis])
    return np.asarray(gradient.sum(axis=over)).reshape(shape)


def logsumexp_backward(
    dout: ArrayLike,
    x: ArrayLike,
    out: ArrayLike,
    *,
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
) -> Float64:
    """Return the gradient with respect to logsumexp's x: scale dout exp(s - out), 0 for s = -inf.

    Parameters
    ----------
    dout : (...) floats
        Gradient with respect to the output.
    x : (..., N) floats
    out : (...) floats
        The output of `logsumexp`, possibly rounded.
    scale, mask, bias, causal
        See the module's docstring.

    Returns
    -------
    (..., N) float64
    """
    per_row = (_float64(each)[..., None] for each in (dout, out))

    def gradient(s: Float64, dout: Float64, out: Float64) -> Float64:
        # At most 1: an out that was rounded to float32 may be below the largest score.
        weights = np.exp(np.minimum(s - np.where(np.isneginf(out), 0.0, out), 0.0))
        return np.where(np.isneginf(s), 0.0, scale * dout * weights)

    return _of_scores(gradient, x, scale, mask, bias, causal, *per_row)


def scores(x: Float64, scale: float, kept: NDArray[np.bool_] | None, bias: Any) -> Float64:
    """Return scale x + bias where a column is kept, -inf elsewhere."""
    s = scale * x
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    return s if kept is None else np.where(kept, s, -np.inf)


def kept_columns(
    shape: tuple[int, ...], mask: ArrayLike | None, causal: bool
) -> NDArray[np.bool_] | None:
    """Return which columns the mask and causality keep, broadcast to the rows' shape."""
    kept = None if mask is None else np.asarray(mask, np.bool_)
    if causal:
        sq, sk = (shape[-2] if len(shape) > 1 else 1), shape[-1]
        seen = np.tri(sq, sk, sk - sq, dtype=np.bool_)
        kept = seen if kept is None else kept & seen
    return None if kept is None else np.broadcast_to(kept.reshape(kept.shape[-len(shape) :]), shape)


def _softmax(s: Float64) -> Float64:
    m = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isneginf(m), 0.0, m))
    total = p.sum(axis=-1, keepdims=True)
    result: Float64 = p / np.where(total == 0, 1.0, total)
    return result


def _log_softmax(s: Float64) -> Float64:
    m, log_l = _maximum_and_log_sum(s)
    return s - m[..., None] - np.where(np.isneginf(log_l), 0.0, log_l)[..., None]


def _logsumexp(s: Float64) -> Float64:
    m, log_l = _maximum_and_log_sum(s)
    return m + log_l


def _maximum_and_log_sum(s: Float64) -> tuple[Float64, Float64]:
    """Return the two terms of the log-sum-exp; the maximum of a row of -inf is 0."""
    m = np.max(s, axis=-1, initial=-np.inf)
    m = np.where(np.isneginf(m), 0.0, m)
    return m, np.log(np.exp(s - m[..., None]).sum(axis=-1))


def _of_scores(
    function: Callable[..., Float64],
    x: ArrayLike,
    scale: float,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    causal: bool,
    *others: Float64,
) -> Float64:
    x = np.asarray(x)
    arrays: dict[str, np.ndarray] = {"x": x}
    kept = kept_columns(x.shape, mask, causal)
    if kept is not None:
        arrays["kept"] = kept
    if bias is not None:
        arrays["bias"] = np.broadcast_to(np.asarray(bias), x.shape)

    def of_block(*block: np.ndarray) -> Float64:
        named = dict(zip(arrays, block, strict=False))
        s = scores(_float64(named["x"]), scale, named.get("kept"), named.get("bias"))
        return function(s, *block[len(arrays) :])

    return by_rows(of_block, *arrays.values(), *others)


def by_rows(function: Callable[..., Float64], *arrays: np.ndarray) -> Float64:
    """Apply a function of whole rows to blocks of the first axis, to keep intermediates small."""
    shape = arrays[0].shape
    # Infinities are valid: a row with +inf gives NaN, and exp(-inf) is 0.
    with np.errstate(invalid="ignore", under="ignore", over="ignore", divide="ignore"):
        if len(shape) < 2 or arrays[0].size <= _ITEMS_PER_BLOCK:
            return function(*arrays)
        step = max(1, _ITEMS_PER_BLOCK * shape[0] // arrays[0].size)
        blocks = [slice(first, first + step) for first in range(0, shape[0], step)]
        return np.concatenate([function(*(array[block] for array in arrays)) for block in blocks])


def _float64(array: ArrayLike) -> Float64:
    return np.asarray(array, dtype=np.float64)
