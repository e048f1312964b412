"""Softmax, its logarithm and the log-sum-exp along an axis, forward and backward."""

from __future__ import annotations

from typing import overload

import numpy as np

from cupyattn.ops.softmax import reference
from cupyattn.ops.softmax.kernels import (
    BACKWARD,
    FORWARD,
    LOGSUMEXP,
    LOGSUMEXP_BACKWARD,
    BiasGradientArrays,
    LogSumExpBackwardArrays,
    Reference,
    ScoreArrays,
    SoftmaxBackwardArrays,
    SoftmaxGrads,
    backward_options,
    require_bias_gradient,
    softmax_gradients,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import checked_once, factor, require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import require_grads, take_grads
from cupyattn.runtime.rows import RowOptions, call_along


@differentiable(
    lambda: softmax_backward,
    gradients=SoftmaxGrads._fields,
    on_demand={"bias": require_bias_gradient},
)
def softmax(
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
    r"""Softmax of s = scale * x + bias over an axis: ``exp(s - max(s)) / sum(exp(s - max(s)))``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy. NumPy arrays may be float64, except on the
        emulator. The axis that softmax runs over is contiguous; the others may have any stride.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x: the inverse of a temperature.
    mask : array that broadcasts to x.shape, optional
        bool, True = keep. Items that are not kept give 0.
    bias : array that broadcasts to x.shape, optional
        float16, float32 or bfloat16, or float64 for an x of float64. Added to scale * x; -inf
        hides an item. Mask and bias are not materialised, and both may have any strides.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq, for an x (..., Sq, Sk). With another `axis`
        the rows are the last of the other axes.
    out : array (..., N), optional
        Where to write the result; must not overlap another array.

    Returns
    -------
    array (..., N), dtype of x
        A row of which nothing is kept, or whose scores are all -inf, gives zeros, as an attention
        row without keys does. A row with a NaN or +inf among its scores gives NaN.

    Raises
    ------
    TypeError
        For something that is no array, a mixture of NumPy and CuPy arrays, a dtype that is not
        allowed, a mask that is not of bool, or a scale that is no number.
    ValueError
        For an array without axes, an axis that does not exist or is not contiguous in x or out, a
        mask or bias that does not broadcast to x, a scale that is not finite, or an out that does
        not fit or overlaps another array. On kernels also if more than four other axes remain after
        merging those with even strides.
    RuntimeError
        As `attention`.

    Notes
    -----
    On a GPU a row of up to 16,384 items is read once, and a longer row twice, by the online softmax
    (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3). Results are computed in float32 and
    rounded once.

    Scores are float32 there. With a scale or a bias, an offset of size A that all scores of a row
    share gives the weights a relative error of about A * 2**-24. If scores exceed 1e4, subtract an
    offset of each row, for example its largest x, from x first.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.softmax(np.array([[0.0, 0.0], [0.0, -np.inf]], np.float32))
    array([[0.5, 0.5],
           [1. , 0. ]], dtype=float32)
    >>> cupyattn.softmax(np.zeros((2, 2), np.float32), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]], dtype=float32)
    """
    exact, options = _forward_options(reference.softmax, scale, causal, False)
    result = call_along(axis, FORWARD, ScoreArrays(x, mask, bias, out), exact, options).out
    assert result is not None
    return result


@overload
def softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = ...,
    scale: float = ...,
    bias: None = ...,
    grads: Array | None = ...,
    accumulate: bool = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = ...,
    scale: float = ...,
    bias: Array,
    grads: SoftmaxGrads | None = ...,
    accumulate: bool = ...,
    workspace: Array | None = ...,
) -> SoftmaxGrads: ...


def softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = -1,
    scale: float = 1.0,
    bias: Array | None = None,
    grads: Array | SoftmaxGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> Array | SoftmaxGrads:
    r"""Gradient of `softmax`: ``dx = scale * out * (dout - sum(out * dout))`` over an axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `softmax`. It contains the effect of mask, bias and causal.
    axis : int
        The axis that `softmax` ran over.
    scale : float
        The scale that `softmax` was given.
    bias : array, optional
        The bias that `softmax` was given, over the last axis. With it there is a dbias; its items
        are not read.
    grads : array (..., N), or with a bias SoftmaxGrads, optional
        Where to write the gradients. They must not overlap another array; dbias is contiguous.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes. By
        default it is allocated. Only a call with a bias needs any; the error for a small one says
        how many bytes.

    Returns
    -------
    array (..., N), dtype of dout, or SoftmaxGrads
        Gradient with respect to x: 0 where the mask hides an item. With a bias ``(dx, dbias)``.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`; also for shapes or dtypes of dout and out that differ. With a bias also for
        another axis than the last and, on kernels, for a workspace that is too small.

    Notes
    -----
    dbias is the gradient with respect to the scores, which is dx with a scale of 1, summed over the
    axes along which bias broadcast. The order of the sum is fixed, so that repeated calls give
    equal bits. On a GPU the float32 terms are computed a second time instead of stored. A bias that
    is one number for all columns changes no weight: its dbias is 0.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> out = cupyattn.softmax(np.zeros((1, 2), np.float32))
    >>> cupyattn.softmax_backward(np.array([[1.0, 0.0]], np.float32), out)
    array([[ 0.25, -0.25]], dtype=float32)
    """
    return _gradients(
        reference.softmax_backward,
        False,
        *(dout, out, bias, grads, workspace),
        axis=axis,
        scale=scale,
        accumulate=accumulate,
    )


@differentiable(
    lambda: log_softmax_backward,
    gradients=SoftmaxGrads._fields,
    on_demand={"bias": require_bias_gradient},
)
def log_softmax(
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
    r"""Log-softmax over an axis: ``s - max(s) - log(sum(exp(s - max(s))))``, s as in `softmax`.

    Parameters
    ----------
    x : array (..., N)
        As for `softmax`.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x.
    mask, bias : arrays that broadcast to x.shape, optional
        A mask of bool, True = keep, and floats that are added to scale * x.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq.
    out : array (..., N), optional
        Where to write the result; must not overlap another array.

    Returns
    -------
    array (..., N), dtype of x
        -inf for items that are not kept; a row of which nothing is kept has -inf everywhere. Where
        `softmax` underflows, the logarithm is still accurate.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.log_softmax(np.array([[0.0, -1000.0], [0.0, -np.inf]], np.float32))
    array([[    0., -1000.],
           [    0.,   -inf]], dtype=float32)
    """
    exact, options = _forward_options(reference.log_softmax, scale, causal, True)
    result = call_along(axis, FORWARD, ScoreArrays(x, mask, bias, out), exact, options).out
    assert result is not None
    return result


@overload
def log_softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = ...,
    scale: float = ...,
    bias: None = ...,
    grads: Array | None = ...,
    accumulate: bool = ...,
    workspace: Array | None = ...,
) -> Array: ...


@overload
def log_softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = ...,
    scale: float = ...,
    bias: Array,
    grads: SoftmaxGrads | None = ...,
    accumulate: bool = ...,
    workspace: Array | None = ...,
) -> SoftmaxGrads: ...


def log_softmax_backward(
    dout: Array,
    out: Array,
    /,
    *,
    axis: int = -1,
    scale: float = 1.0,
    bias: Array | None = None,
    grads: Array | SoftmaxGrads | None = None,
    accumulate: bool = False,
    workspace: Array | None = None,
) -> Array | SoftmaxGrads:
    r"""Gradient of `log_softmax`: ``dx = scale * (dout - exp(out) * sum(dout))`` over an axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `log_softmax`.
    axis, scale : int, float
        The options that `log_softmax` was given.
    bias, grads, accumulate, workspace : optional
        As for `softmax_backward`.

    Returns
    -------
    array (..., N), dtype of dout, or SoftmaxGrads
        Gradient with respect to x; with a bias ``(dx, dbias)``. Where out is -inf the gradient is 0
        whatever dout is: rows of which nothing is kept give zeros.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax_backward`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> out = cupyattn.log_softmax(np.zeros((1, 2), np.float32))
    >>> cupyattn.log_softmax_backward(np.array([[1.0, 0.0]], np.float32), out)
    array([[ 0.5, -0.5]], dtype=float32)
    """
    return _gradients(
        reference.log_softmax_backward,
        True,
        *(dout, out, bias, grads, workspace),
        axis=axis,
        scale=scale,
        accumulate=accumulate,
    )


@differentiable(lambda: logsumexp_backward, gradients=("dx",))
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
    r"""Log-sum-exp over an axis: ``max(s) + log(sum(exp(s - max(s))))``, s as in `softmax`.

    Parameters
    ----------
    x : array (..., N)
        As for `softmax`. It is read once.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x.
    mask, bias : arrays that broadcast to x.shape, optional
        A mask of bool, True = keep, and floats that are added to scale * x.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq.
    out : array (...), optional
        Where to write the result. Its last axis is contiguous, and it overlaps no other array.

    Returns
    -------
    array (...), float32
        x's shape without the axis; float64 for an x of float64. A row of which nothing is kept, or
        whose scores are all -inf, gives -inf. A row with a NaN or +inf among its scores gives NaN.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`.

    Notes
    -----
    A result of size A is rounded to float32 by up to A * 2**-24. That is the relative error of the
    weights in `logsumexp_backward`, on NumPy arrays too. If scores exceed 1e4, subtract an offset
    of each row from x first, and add it to the result.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.logsumexp(np.array([[1e4, 1e4], [-np.inf, 1.0]], np.float32))
    array([1.0000693e+04, 1.0000000e+00], dtype=float32)
    """
    exact, options = _forward_options(reference.logsumexp, scale, causal, False)
    result = call_along(axis, LOGSUMEXP, ScoreArrays(x, mask, bias, out), exact, options).out
    assert result is not None
    return result


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
        The result of `logsumexp`.
    axis, scale, mask, bias, causal
        The options of `logsumexp`. dx / scale is the gradient of a bias of x's shape.
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
        As `softmax`; also for a dout or out without an item for each row.

    Notes
    -----
    An out of size A is rounded to float32 by up to A * 2**-24. That is the relative error of the
    gradient, on NumPy arrays too. If scores exceed 1e4, subtract an offset of each row from x
    before both calls: the gradient does not depend on it.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.zeros((1, 2), np.float32)
    >>> cupyattn.logsumexp_backward(np.ones(1, np.float32), x, cupyattn.logsumexp(x))
    array([[0.5, 0.5]], dtype=float32)
    """
    exact, options = _logsumexp_backward_options(scale, accumulate, causal)
    require_grads(grads, accumulate)
    arrays = LogSumExpBackwardArrays(x, dout, out, mask, bias, grads)
    dx = call_along(axis, LOGSUMEXP_BACKWARD, arrays, exact, options).dx
    assert dx is not None
    return dx


def _gradients(
    gradient: Reference,
    logarithm: bool,
    dout: Array,
    out: Array,
    bias: Array | None,
    grads: Array | SoftmaxGrads | None,
    workspace: Array | None,
    *,
    axis: int,
    scale: float,
    accumulate: bool,
) -> Array | SoftmaxGrads:
    """Return dx, or with a bias dx and dbias; `gradient` is the reference of dx."""
    if bias is None and isinstance(grads, tuple):
        raise error(
            TypeError,
            f"grads has type {type(grads).__name__}, and bias is None",
            "without a bias it must be one array, that of dx",
            "pass grads=dx, or the bias of the call",
        )
    exact, options = backward_options(gradient, scale, accumulate, logarithm)
    if bias is not None:
        arrays = BiasGradientArrays(dout, out, bias, workspace)
        take_grads(arrays, SoftmaxGrads, grads, accumulate)
        return softmax_gradients(arrays, axis, gradient, exact, options)
    assert not isinstance(grads, tuple)
    require_grads(grads, accumulate)
    dx = call_along(axis, BACKWARD, SoftmaxBackwardArrays(dout, out, grads), exact, options).dx
    assert dx is not None
    return dx


@checked_once
def _forward_options(
    function: Reference, scale: object, causal: object, logarithm: bool
) -> tuple[Reference, RowOptions]:
    """Check the options of scores; return the reference with them, and those of the kernel."""
    scale = factor("scale", scale)
    require_bool("causal", causal)
    choices = {"causal": bool(causal), "logarithm": logarithm}

    def exact(x: np.ndarray, mask: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
        return function(x, scale=scale, mask=mask, bias=bias, causal=bool(causal))

    return exact, RowOptions.of(choices=choices, scale=scale)


@checked_once
def _logsumexp_backward_options(
    scale: object, accumulate: object, causal: object
) -> tuple[Reference, RowOptions]:
    scale = factor("scale", scale)
    require_bool("accumulate", accumulate)
    require_bool("causal", causal)

    def exact(
        x: np.ndarray,
        dout: np.ndarray,
        out: np.ndarray,
        mask: np.ndarray | None,
        bias: np.ndarray | None,
    ) -> np.ndarray:
        return reference.logsumexp_backward(
            dout, x, out, scale=scale, mask=mask, bias=bias, causal=bool(causal)
        )

    choices = {"causal": bool(causal)}
    return exact, RowOptions.of(choices=choices, accumulate=bool(accumulate), scale=scale)
