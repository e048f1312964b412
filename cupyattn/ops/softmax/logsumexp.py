"""The log-sum-exp of rows, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.softmax import kernels, reference
from cupyattn.ops.softmax.scores import call_along
from cupyattn.runtime.arrays import Array


def logsumexp(
    x: Array,
    /,
    *,
    axis: int = -1,
    scale: float = 1.0,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    out: Array | None = None,
) -> Array:
    r"""Log-sum-exp over an axis: ``max(s) + log(sum(exp(s - max(s))))`` of `softmax`'s scores.

    Parameters
    ----------
    x : array (..., N)
        As `softmax` takes it, with the options below. It is read once.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x.
    mask, bias : arrays that broadcast to x.shape, optional
        bool, True = keep; and a float that is added to scale * x.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq.
    out : array (...), optional
        Where to write the result: its last axis is contiguous, and it overlaps no other array.

    Returns
    -------
    array (...), float32
        x's shape without the axis; float64 for an x of float64. A row of which nothing is kept, or
        whose every score is -inf, gives -inf; NaN and +inf give NaN.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`.

    Notes
    -----
    The result is float32, rounded by up to A * 2**-24 where it is of size A; that is the relative
    error of the weights in `logsumexp_backward`, on NumPy arrays too. Where scores pass 1e4
    subtract a row's offset from x first, and add it to the result.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.logsumexp(np.array([[1e4, 1e4], [-np.inf, 1.0]], np.float32))
    array([1.0000693e+04, 1.0000000e+00], dtype=float32)
    """
    return call_along(
        axis,
        kernels.LOGSUMEXP,
        kernels.ScoreArrays(x, mask, bias, out),
        reference.logsumexp,
        causal=causal,
        scale=scale,
    )


def logsumexp_backward(
    dout: Array,
    x: Array,
    out: Array,
    /,
    *,
    axis: int = -1,
    scale: float = 1.0,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    grads: Array | None = None,
    accumulate: bool = False,
) -> Array:
    r"""Gradient of `logsumexp`: ``dx = scale * dout * exp(s - out)``.

    Parameters
    ----------
    dout : array (...), float32
        Gradient with respect to the result; float64 for an x of float64.
    x : array (..., N)
        The array that `logsumexp` was given.
    out : array (...), float32
        Its result.
    axis, scale, mask, bias, causal
        Its options. dx / scale is the gradient of a bias of x's shape.
    grads : array (..., N), optional
        Where to write the gradient; must not overlap another array.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    array (..., N), dtype of x
        Gradient with respect to x; 0 where nothing is kept.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`; and for a dout or out that has not an item for each row.

    Notes
    -----
    out is float32, rounded by up to A * 2**-24 where it is of size A: that is the relative error of
    the gradient, on NumPy arrays too. Where scores pass 1e4 subtract a row's offset first: the
    gradient has none.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.zeros((1, 2), np.float32)
    >>> cupyattn.logsumexp_backward(np.ones(1, np.float32), x, cupyattn.logsumexp(x))
    array([[0.5, 0.5]], dtype=float32)
    """
    arrays = kernels.LogSumExpBackwardArrays(x, dout, out, mask, bias, grads)

    def exact(x: Array, dout: Array, out: Array, **options: Any) -> Array:
        return reference.logsumexp_backward(dout, x, out, **options)

    return call_along(
        axis,
        kernels.LOGSUMEXP_BACKWARD,
        arrays,
        exact,
        causal=causal,
        scale=scale,
        accumulate=accumulate,
    )
