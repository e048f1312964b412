"""The logarithm of softmax, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.softmax import kernels, reference
from cupyattn.ops.softmax.bias_gradient import BiasGradientArrays, softmax_gradients
from cupyattn.ops.softmax.scores import SoftmaxGrads, call_along
from cupyattn.runtime.arrays import Array


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
    r"""Log-softmax over an axis: ``s - max(s) - log(sum(exp(s - max(s))))`` of `softmax`'s scores.

    Parameters
    ----------
    x : array (..., N)
        As `softmax` takes it, with the options below.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x.
    mask, bias : arrays that broadcast to x.shape, optional
        bool, True = keep; and a float that is added to scale * x.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq.
    out : array (..., N), optional
        Where to write the result; must not overlap another array.

    Returns
    -------
    array (..., N), dtype of x
        -inf where `softmax` has zeros because nothing is kept there: a row of which nothing is
        kept is -inf throughout. Where softmax underflows the logarithm is still right.

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
    return call_along(
        axis,
        kernels.FORWARD,
        kernels.ScoreArrays(x, mask, bias, out),
        reference.log_softmax,
        causal=causal,
        scale=scale,
        logarithm=True,
    )


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
) -> Any:
    r"""Gradient of `log_softmax`: ``dx = scale * (dout - exp(out) * sum(dout))`` over an axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `log_softmax`.
    axis, scale : int, float
        Those that `log_softmax` was given.
    bias, grads, accumulate, workspace : optional
        As of `softmax_backward`.

    Returns
    -------
    array (..., N), dtype of dout, or SoftmaxGrads
        Gradient with respect to x; with a bias ``(dx, dbias)``. Where out is -inf it is 0, and dout
        does not count, whatever it is: so rows of which nothing is kept give zeros.

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
    return softmax_gradients(
        reference.log_softmax_backward,
        BiasGradientArrays(dout, out, bias, workspace=workspace),
        grads,
        axis,
        scale,
        accumulate,
        logarithm=True,
    )
