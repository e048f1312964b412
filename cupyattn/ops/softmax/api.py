"""Softmax, forward and backward."""

from __future__ import annotations

from typing import Any

from cupyattn.ops.softmax import kernels, reference
from cupyattn.ops.softmax.bias_gradient import BiasGradientArrays, softmax_gradients
from cupyattn.ops.softmax.scores import SoftmaxGrads, call_along
from cupyattn.runtime.arrays import Array


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
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The axis that softmax runs over is contiguous; the others may have any stride.
    axis : int
        The axis to run over, by default the last.
    scale : float
        Factor of x, a temperature's inverse.
    mask : array that broadcasts to x.shape, optional
        bool, True = keep: what is not kept gets 0.
    bias : array that broadcasts to x.shape, optional
        float16, float32 or bfloat16 (float64 beside such an x), added to scale * x; -inf hides.
        Neither mask nor bias is materialised where it broadcasts, and both may have any strides.
    causal : bool
        Keep column j of row i only if j <= i + Sk - Sq, for an x (..., Sq, Sk): of the axes other
        than `axis` the last has the rows.
    out : array (..., N), optional
        Where to write the result; must not overlap another array.

    Returns
    -------
    array (..., N), dtype of x
        A row of which nothing is kept, or whose every score is -inf, gives zeros, as an attention
        row without keys. NaN and +inf among the scores of a row fill it with NaN.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, a dtype that is not allowed, a
        mask that is not of bool, or a scale that is no number.
    ValueError
        For an array without axes, an axis that it has not or that is not contiguous in x or out, a
        mask or bias that does not broadcast to x, a scale that is not finite, or an out that does
        not fit or overlaps another array; for kernels also if more than four other axes lie
        unevenly in memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    On a GPU a row of up to 16,384 items is read once; longer ones twice, by the online softmax
    (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3). float32 inside, one rounding.

    Scores are float32 there: with a scale or a bias, an offset that all scores of a row share, of
    size A, costs the weights a relative error of about A * 2**-24. Where scores pass 1e4 subtract a
    row's offset, its largest x for example, from x first.

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
    return call_along(
        axis,
        kernels.FORWARD,
        kernels.ScoreArrays(x, mask, bias, out),
        reference.softmax,
        causal=causal,
        scale=scale,
        logarithm=False,
    )


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
) -> Any:
    r"""Gradient of `softmax`: ``dx = scale * out * (dout - sum(out * dout))`` over an axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `softmax`, which has mask, bias and causality in it.
    axis : int
        The one that `softmax` was given.
    scale : float
        The one that `softmax` was given.
    bias : array, optional
        As given to `softmax`, over its last axis: then there is a dbias. It is not read.
    grads : array (..., N), or with a bias SoftmaxGrads, optional
        Where to write the gradients; must not overlap another array. A dbias is contiguous.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.
    workspace : array, optional
        Scratch memory for kernels, of any plain dtype, in C order and aligned to 16 bytes;
        otherwise it is allocated. There is some only with a bias. An error says how many bytes.

    Returns
    -------
    array (..., N), dtype of dout, or SoftmaxGrads
        Gradient with respect to x; 0 where the mask hides. With a bias ``(dx, dbias)``.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`; for shapes or dtypes of dout and out that differ; and with a bias for another
        axis than the last, and of kernels for a workspace that is too small.

    Notes
    -----
    dbias is the gradient of the scores, dx with a scale of 1, summed over the axes along which bias
    broadcast, in a fixed order: the same from run to run. On a GPU its terms are float32, computed
    once more, so that no array holds them. A bias that is one number for all columns moves no
    weight: its dbias is 0.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> out = cupyattn.softmax(np.zeros((1, 2), np.float32))
    >>> cupyattn.softmax_backward(np.array([[1.0, 0.0]], np.float32), out)
    array([[ 0.25, -0.25]], dtype=float32)
    """
    return softmax_gradients(
        reference.softmax_backward,
        BiasGradientArrays(dout, out, bias, workspace=workspace),
        grads,
        axis,
        scale,
        accumulate,
        logarithm=False,
    )
