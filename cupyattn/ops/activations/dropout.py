"""Dropout, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyattn.ops.activations import reference
from cupyattn.ops.activations.kernels import DROPOUT, DropoutArrays, DropoutBackwardArrays
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import integer, real, require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.elements import Part, call_elements
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import named_grads, require_grads

FIELDS = 65536
"""Number of values of an item's random field."""


class Draw(NamedTuple):
    """A checked probability and seed."""

    p: float
    seed: int

    @classmethod
    def of(cls, p: object, seed: object) -> Draw:
        """Check the options of a call."""
        probability = real("p", p)
        if not 0.0 <= probability < 1.0:
            raise error(
                ValueError,
                f"p = {probability}",
                "it is at least 0 and below 1",
                "pass the fraction of items to drop, 0.1 for a tenth",
            )
        if seed is None:
            if probability > 0.0:
                raise error(
                    ValueError,
                    f"p = {probability} without a seed",
                    "dropout draws its mask from the seed alone, so that the backward can draw it "
                    "again",
                    "pass an integer seed, another one each training step",
                )
            return cls(probability, 0)
        number = integer("seed", seed)
        if not 0 <= number < 2**64:
            raise error(
                ValueError,
                f"seed = {shown(seed)}",
                "it is an integer from 0 to 2**64 - 1",
                "reduce it modulo 2**64",
            )
        return cls(probability, number)

    def exact(self, x: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
        """Return the reference's result."""
        return reference.dropout(x, self.p, self.seed, residual)

    @property
    def scalars(self) -> dict[str, float]:
        """The kernel's scalars by name."""
        keep_from = round(FIELDS * self.p)
        return {
            "seed": self.seed,
            "keep_from": keep_from,
            "keep_scale": FIELDS / (FIELDS - keep_from) if keep_from < FIELDS else 0.0,
        }


class DropoutGrads(NamedTuple):
    """Gradients of the inputs of `dropout`.

    Attributes
    ----------
    dx : array (..., N)
        Gradient with respect to x.
    dresidual : array (..., N)
        Gradient with respect to the residual, if there was one: dout itself.
    """

    dx: Array | None = None
    dresidual: Array | None = None


@differentiable(lambda: dropout_backward, gradients=DropoutGrads._fields)
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
        1/65536, and the scale is computed from the rounded p, so that the mean of the result is x.
        A p that rounds to 1 drops everything: the result is zeros (or the residual).
    seed : int or None
        The seed of the mask, 0 to 2**64 - 1: pass another one in each call. None is allowed only
        with p = 0.
    residual : array (..., N), dtype of x, optional
        Added to the result, in the same pass.
    out : array (..., N), optional
        Where to write the result: x or residual itself, or memory that overlaps neither.

    Returns
    -------
    array (..., N), dtype of x
        A dropped item is 0 even where x is NaN or infinite.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`; for a p or seed out of range; for p > 0 without a seed; and for a residual of
        another shape or dtype.

    Notes
    -----
    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (JMLR
    15, 2014). The mask depends only on the seed, p and an item's number e in C order, neither on
    strides nor on the device. Philox4x32-10 with the seed as key and the counter (e // 8, 0, 2**31)
    gives eight fields of 16 bits. Item e takes field e % 8, and is kept if that is at least
    round(65536 p). The backward draws the same mask again.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.dropout(np.ones(8, np.float32), 0.5, 0)
    array([2., 2., 2., 2., 0., 2., 0., 0.], dtype=float32)
    """
    draw = Draw.of(p, seed)
    arrays = DropoutArrays(x, residual, out)
    result = call_elements(DROPOUT, arrays, draw.exact, scalars=draw.scalars).out
    assert result is not None
    return result


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
        Its dx is where to write the gradient of x: dout itself, or memory that does not overlap
        dout. Its dresidual is None, because that gradient is dout.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    DropoutGrads
        ``(dx, dresidual)``. dresidual is dout itself, not a copy: if dx is written over dout, use
        dresidual before the call.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `dropout`; for grads of another shape or dtype; and for accumulate without grads.

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
    results = call_elements(DROPOUT, arrays, draw.exact, parts=parts, scalars=draw.scalars)
    return DropoutGrads(results.dx, dout)
