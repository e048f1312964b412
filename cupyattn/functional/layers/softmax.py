"""Softmax, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn import reference
from cupyattn.arrays import Array, Layout, adopt
from cupyattn.functional.layers.rows import call_rows
from cupyattn.kernels.configs.layers import softmax as softmax_rows
from cupyattn.kernels.configs.rows import RowKernel
from cupyattn.ops.checks import require_contiguous_axis


def softmax(x: Array, /, *, axis: int = -1, out: Array | None = None) -> Array:
    r"""Softmax over an axis: ``exp(x - max(x)) / sum(exp(x - max(x)))``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The axis that softmax runs over is contiguous; the others may have any stride.
    axis : int
        The axis to run over, by default the last.
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
    arrays = {"x": x, "out": out}
    return _along(axis, softmax_rows.FORWARD, arrays, reference.softmax)


def softmax_backward(
    dout: Array, out: Array, /, *, axis: int = -1, dx: Array | None = None
) -> Array:
    r"""Gradient of `softmax`: ``dx = out * (dout - sum(out * dout))`` over an axis.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    out : array (..., N), dtype of dout
        The result of `softmax`.
    axis : int
        The one that `softmax` was given.
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
    arrays = {"dout": dout, "out": out, "dx": dx}
    return _along(axis, softmax_rows.BACKWARD, arrays, reference.softmax_backward)


def _along(
    axis: int, kernel: RowKernel, arrays: dict[str, Any], exact: Callable[..., np.ndarray]
) -> Array:
    """Run over an axis, which is the last of what the kernel sees."""
    if type(axis) is int and axis == -1:  # -1.0 equals it, and is no axis
        (result,) = call_rows(kernel, arrays, exact).values()
        return result
    operands = adopt(arrays).arrays
    for name, array in operands.items():
        require_contiguous_axis(name, Layout(array.shape, array.strides, array.dtype), axis)
    moved = {name: _moved(array, axis, -1) for name, array in operands.items()}
    ((name, result),) = call_rows(kernel, moved, exact).items()
    return operands[name] if name in operands else _moved(result, -1, axis)


def _moved(array: Array, source: int, destination: int) -> Array:
    """Return a view whose axis `source` stands at `destination`."""
    axes = list(range(array.ndim))
    axes.insert(destination % array.ndim, axes.pop(source))
    return array.transpose(axes)
