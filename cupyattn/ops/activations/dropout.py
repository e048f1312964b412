"""Dropout, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.activations import reference
from cupyattn.ops.activations.kernels_dropout import DROPOUT, DropoutArrays, DropoutBackwardArrays
from cupyattn.ops.activations.plan_dropout import Draw
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.call_elements import call_elements
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.elements import Part
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import named_grads, require_grads


class DropoutGrads(NamedTuple):
    """Gradients of dropout's inputs.

    Attributes
    ----------
    dx : array (..., N)
        Of x.
    dresidual : array (..., N)
        Of a residual, if there was one: the gradient of the result itself.
    """

    dx: Array = None
    dresidual: Array = None


def dropout(
    x: Array,
    p: float,
    seed: int | None,
    /,
    *,
    residual: Array | None = None,
    out: Array | None = None,
) -> Array:
    r"""Set items to 0 with probability p, and scale the others by ``1 / (1 - p)``.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride.
    p : float
        Probability of dropping an item, at least 0 and below 1. It is rounded to a multiple of
        1/65536, and the scale is that of the rounded p, so that the result is x on average. A p
        that rounds to 1 drops everything: the result is zeros (or the residual).
    seed : int or None
        What the mask is drawn from, 0 to 2**64 - 1: another one each call. None only with p = 0.
    residual : array (..., N), dtype of x, optional
        Is added, in the same pass.
    out : array (..., N), optional
        Where to write the result: x or residual itself, or memory that overlaps neither.

    Returns
    -------
    array (..., N), dtype of x
        A dropped item is 0 even where x is NaN or infinite.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`; for p or a seed out of range, or no seed; and for a residual that does not fit.

    Notes
    -----
    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (JMLR
    15, 2014). The mask depends on the seed, p and an item's number e in C order alone, neither on
    strides nor on the device: Philox4x32-10 with the seed as key and the counter (e // 8, 0, 2**31)
    gives eight fields of 16 bits, of which item e takes number e % 8; it is kept where that is at
    least round(65536 p). The backward draws it again.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.dropout(np.ones(8, np.float32), 0.5, 0)
    array([2., 2., 2., 2., 0., 2., 0., 0.], dtype=float32)
    """
    draw = Draw.of(p, seed)
    arrays = DropoutArrays(x, residual, out)
    return call_elements(DROPOUT, arrays, _exact(draw), scalars=draw.scalars).out


def dropout_backward(
    dout: Array,
    p: float,
    seed: int | None,
    /,
    *,
    grads: DropoutGrads | None = None,
    accumulate: bool = False,
) -> DropoutGrads:
    r"""Gradients of `dropout`: the same mask and scale, applied to dout.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    p, seed : float, int or None
        As given to `dropout`.
    grads : DropoutGrads, optional
        Its dx is where to write the gradient of x: dout itself, or memory that does not overlap it.
        It has no dresidual, which is dout.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    DropoutGrads
        ``(dx, dresidual)``. The gradient of a residual is dout itself, no copy of it: where dx is
        written over dout it must be used before.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `dropout`; for grads that do not fit; and for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.dropout_backward(np.arange(8, dtype=np.float32), 0.5, 0).dx
    array([ 0.,  2.,  4.,  6.,  0., 10.,  0.,  0.], dtype=float32)
    """
    draw = Draw.of(p, seed)
    require_bool("accumulate", accumulate)
    given = named_grads(DropoutGrads, grads, accumulate, ("dx",))
    if given.get("dresidual") is not None:
        raise error(
            ValueError,
            "grads.dresidual was given",
            "the gradient of a residual is dout itself, and is not written",
            "pass grads=DropoutGrads(dx)",
        )
    dx = given.get("dx")
    require_grads(dx, accumulate, "pass grads=DropoutGrads(dx)")
    added_to = "dx" if accumulate else "none"
    parts = {"x": Part("dout"), "out": Part("dx"), "residual": Part(added_to)}
    arrays = DropoutBackwardArrays(dout, dx)
    results = call_elements(DROPOUT, arrays, _exact(draw), parts=parts, scalars=draw.scalars)
    return DropoutGrads(results.dx, dout)


def _exact(draw: Draw) -> Any:
    def exact(x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
        return reference.dropout(x, draw.p, draw.seed, residual)

    return exact
