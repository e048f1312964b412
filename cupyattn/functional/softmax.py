"""Softmax over the last axis, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupyattn import reference
from cupyattn.arrays import Array, Operands, addresses, adopt
from cupyattn.functional.backend import device_of
from cupyattn.functional.rounding import round_into
from cupyattn.ops.checks import require_disjoint
from cupyattn.ops.softmax import SoftmaxProblem, softmax_problem, softmax_rows


def softmax(x: Array, /, *, out: Array | None = None) -> Array:
    r"""Softmax over the last axis: ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy. The last axis is contiguous; the others may
        have any stride.
    out : array (..., N), optional
        Where to write the result; must not overlap x.

    Returns
    -------
    array (..., N), dtype of x
        A row whose every entry is -inf gives zeros, as an attention row without keys.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For an array without axes, a last axis that is not contiguous, or an out that does not fit
        or overlaps x; for kernels also if more than four axes before the last lie unevenly in
        memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    On a GPU a row of up to 8,192 items is read once; longer ones twice, by the online softmax
    (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3). float32 inside, one rounding.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.softmax(np.array([[0.0, 0.0], [0.0, -np.inf]], np.float32))
    array([[0.5, 0.5],
           [1. , 0. ]], dtype=float32)
    """
    operands = adopt({"x": x, "out": out})
    problem = softmax_problem(operands.layout_key(), "out")
    return _run(operands, problem, reference.softmax)


def softmax_backward(dout: Array, out: Array, /, *, dx: Array | None = None) -> Array:
    r"""Gradient of `softmax`: ``dx = out * (dout - sum(out * dout))`` over the last axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `softmax`.
    dx : array (..., N), optional
        Where to write the gradient; must not overlap dout or out.

    Returns
    -------
    array (..., N), dtype of dout
        Gradient with respect to x.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `softmax`; and for shapes or dtypes of dout and out that differ.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> out = cupyattn.softmax(np.zeros((1, 2), np.float32))
    >>> cupyattn.softmax_backward(np.array([[1.0, 0.0]], np.float32), out)
    array([[ 0.25, -0.25]], dtype=float32)
    """
    operands = adopt({"dout": dout, "out": out, "dx": dx})
    problem = softmax_problem(operands.layout_key(), "dx")
    return _run(operands, problem, reference.softmax_backward)


def _run(operands: Operands, problem: SoftmaxProblem, exact: Callable[..., np.ndarray]) -> Array:
    arrays = operands.arrays
    device = device_of(operands)
    if device is not None:
        return softmax_rows(device, problem, arrays)
    require_disjoint((problem.result,), arrays, addresses(arrays), problem.spans)
    inputs = (arrays[name] for name in problem.inputs)
    return round_into(arrays.get(problem.result), exact(*inputs), problem.dtype)
