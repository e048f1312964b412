"""Gated activations, forward and backward."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from cupyattn.ops.activations import reference
from cupyattn.ops.activations.api import gelu_kind
from cupyattn.ops.activations.kernels import (
    ACTIVATIONS,
    GATED,
    GATED_BACKWARD,
    GatedArrays,
    GatedBackwardArrays,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.call_elements import call_elements
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.elements import Part
from cupyattn.runtime.errors import error
from cupyattn.runtime.outputs import take_grads


class GatedGrads(NamedTuple):
    """Gradients of the inputs of swiglu or geglu.

    Attributes
    ----------
    dgate : array (..., N), or (..., 2N) where gate and up were packed
        Of gate, or of the packed array.
    dup : array (..., N), or None
        Of up, where it was given by itself.
    """

    dgate: Array = None
    dup: Array | None = None


_PACKED = {
    "gate": Part("gate", 0, 2),
    "up": Part("gate", 1, 2),
    "dgate": Part("dgate", 0, 2),
    "dup": Part("dgate", 1, 2),
}


def swiglu(gate: Array, up: Array | None = None, /, *, out: Array | None = None) -> Array:
    r"""Gated linear unit with silu: ``silu(gate) * up``.

    Parameters
    ----------
    gate : array (..., N), or (..., 2N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride. Without `up` it is
        packed: its last axis has gate, then up, as a product with both matrices side by side
        leaves them.
    up : array (..., N), dtype of gate, optional
        What is gated.
    out : array (..., N), optional
        Where to write the result: gate or up itself where they are two arrays, or memory that
        overlaps neither.

    Returns
    -------
    array (..., N), dtype of gate

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`; for shapes or dtypes of gate and up that differ; and for a packed array whose
        last axis is odd.

    Notes
    -----
    Shazeer, "GLU variants improve transformer", arXiv:2002.05202. float32 inside, one rounding.
    Where silu(gate) is nearer to 0 than 2**-118 (3e-36) it may count as 0, as `gelu` documents,
    however large up is.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> gate, up = np.array([[0.0, 1.0], [3.0, 2.0]], np.float32)
    >>> cupyattn.swiglu(gate, up).round(4)
    array([0.    , 1.4621], dtype=float32)
    >>> cupyattn.swiglu(np.concatenate([gate, up])).round(4)
    array([0.    , 1.4621], dtype=float32)
    """
    return _gated("silu", gate, up, out)


def swiglu_backward(
    dout: Array,
    gate: Array,
    up: Array | None = None,
    /,
    *,
    grads: GatedGrads | None = None,
    accumulate: bool = False,
) -> GatedGrads:
    r"""Gradients of `swiglu`.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    gate, up : array
        As given to `swiglu`.
    grads : GatedGrads, optional
        Arrays to write the gradients into: any of the inputs itself, of the same shape, or memory
        that overlaps none. A field that is None makes a new one.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    GatedGrads
        ``(dgate, dup)``. Where gate is packed so is dgate, and dup is None.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu`; for a dout or grads that do not fit; and for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> gate, up = np.array([[0.0, 1.0], [3.0, 2.0]], np.float32)
    >>> dgate, dup = cupyattn.swiglu_backward(np.ones(2, np.float32), gate, up)
    >>> dgate.round(4), dup.round(4)
    (array([1.5   , 1.8553], dtype=float32), array([0.    , 0.7311], dtype=float32))
    """
    return _gated_backward("silu", dout, gate, up, grads, accumulate)


def geglu(
    gate: Array,
    up: Array | None = None,
    /,
    *,
    approximate: str = "none",
    out: Array | None = None,
) -> Array:
    r"""Gated linear unit with gelu: ``gelu(gate) * up``.

    Parameters
    ----------
    gate : array (..., N), or (..., 2N)
        As `swiglu` takes it; without `up` it is packed, gate then up.
    up : array (..., N), dtype of gate, optional
        What is gated.
    approximate : {"none", "tanh"}
        Which `gelu`.
    out : array (..., N), optional
        As of `swiglu`.

    Returns
    -------
    array (..., N), dtype of gate

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu`; and for another approximation.

    Notes
    -----
    Shazeer, "GLU variants improve transformer", arXiv:2002.05202. float32 inside, one rounding.
    Where gelu(gate) is nearer to 0 than 2**-118 (3e-36) it may count as 0, as in `swiglu`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> gate, up = np.array([[0.0, 1.0], [3.0, 2.0]], np.float32)
    >>> cupyattn.geglu(gate, up, approximate="tanh").round(4)
    array([0.    , 1.6824], dtype=float32)
    """
    return _gated(gelu_kind(approximate), gate, up, out)


def geglu_backward(
    dout: Array,
    gate: Array,
    up: Array | None = None,
    /,
    *,
    approximate: str = "none",
    grads: GatedGrads | None = None,
    accumulate: bool = False,
) -> GatedGrads:
    r"""Gradients of `geglu`.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    gate, up : array
        As given to `geglu`.
    approximate : {"none", "tanh"}
        As given to `geglu`.
    grads : GatedGrads, optional
        Arrays to write the gradients into, as of `swiglu_backward`.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    GatedGrads
        ``(dgate, dup)``. Where gate is packed so is dgate, and dup is None.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu_backward`; and for another approximation.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> packed = np.array([0.0, 1.0, 3.0, 2.0], np.float32)
    >>> dpacked, _ = cupyattn.geglu_backward(np.ones(2, np.float32), packed)
    >>> dpacked.round(4)
    array([1.5   , 2.1666, 0.    , 0.8413], dtype=float32)
    """
    return _gated_backward(gelu_kind(approximate), dout, gate, up, grads, accumulate)


def _gated(kind: str, gate: Array, up: Array | None, out: Array | None) -> Array:
    arrays = GatedArrays(gate, up, out)
    parts = _PACKED if up is None else None
    exact = partial(reference.gated, kind=kind)
    decided = {"ACTIVATION": ACTIVATIONS[kind]}
    return call_elements(GATED, arrays, exact, parts=parts, decided=decided).out


def _gated_backward(
    kind: str,
    dout: Array,
    gate: Array,
    up: Array | None,
    grads: Any,
    accumulate: bool,
) -> GatedGrads:
    require_bool("accumulate", accumulate)
    arrays = take_grads(GatedBackwardArrays(dout, gate, up), GatedGrads, grads, accumulate)
    if up is None and arrays.dup is not None:
        raise error(
            ValueError,
            "grads.dup was given for packed gate and up",
            "dgate then has both gradients, packed",
            "pass grads=GatedGrads(dgate)",
        )
    results = call_elements(
        GATED_BACKWARD,
        arrays,
        partial(reference.gated_backward, kind=kind),
        parts=_PACKED if up is None else None,
        decided={"ACTIVATION": ACTIVATIONS[kind]},
        accumulate=accumulate,
    )
    return GatedGrads(results.dgate, results.dup)
