"""Activations, gated activations and sums in float32."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cupyattn.ops.activations import cpu, reference
from cupyattn.ops.activations.kernels import (
    ACTIVATIONS,
    ADD_TO,
    BACKWARD,
    FORWARD,
    GATED,
    GATED_BACKWARD,
    ActivationArrays,
    ActivationBackwardArrays,
    AddToArrays,
    GatedArrays,
    GatedBackwardArrays,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.checks import require_bool
from cupyattn.runtime.differentiable import differentiable
from cupyattn.runtime.elements import Part, call_elements
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.outputs import take_grads

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


class GatedGrads(NamedTuple):
    """Gradients of the inputs of `swiglu` or `geglu`; in ``grads=`` the arrays to write them into.

    Attributes
    ----------
    dgate : array (..., N), or (..., 2N) where gate and up were packed
        Gradient with respect to gate, or to the packed array.
    dup : array (..., N), or None
        Gradient with respect to up; None where gate and up were packed.
    """

    dgate: Array | None = None
    dup: Array | None = None


_PACKED = {
    "gate": Part("gate", 0, 2),
    "up": Part("gate", 1, 2),
    "dgate": Part("dgate", 0, 2),
    "dup": Part("dgate", 1, 2),
}


@differentiable(lambda: gelu_backward, gradients=("dx",))
def gelu(x: Array, /, *, approximate: str = "none", out: Array | None = None) -> Array:
    r"""Gaussian error linear unit: ``x * Phi(x)`` with the normal distribution function Phi.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride.
    approximate : {"none", "tanh"}
        "none" is exact: ``x * (1 + erf(x / sqrt(2))) / 2``. "tanh" is the approximation that GPT-2
        uses: ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``.
    out : array (..., N), optional
        Where to write the result: x itself, or memory that does not overlap it.

    Returns
    -------
    array (..., N), dtype of x
        -inf gives -0 and inf gives inf: the limits.

    Raises
    ------
    TypeError
        For an argument that is not an array, NumPy and CuPy arrays mixed, or a dtype that is not
        allowed.
    ValueError
        For an unknown approximation, a last axis that is not contiguous, an out of another
        shape or dtype, or an out that overlaps x and is not x. Kernels also refuse arrays whose
        axes before the last leave more than four axes after merging.
    RuntimeError
        As `attention`.

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian error linear units", arXiv:1606.08415. Computed in
    float32, rounded once. For large negative x, where ``1 + erf`` and ``1 + tanh`` cancel, results
    keep their relative accuracy down to 2**-118 (3e-36). A result nearer to 0 may be 0, because
    float32 exponentials are flushed to 0 below 2**-126: gelu(-13), which is -8e-38, is -0. The
    gradient has the same limit before it is multiplied by dout. float64 arrays have no such limit.
    On NumPy arrays the exact gelu of float32 errs by less than one unit in the last place, and
    activations of float16 and bfloat16 are the exact results, rounded once.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.array([-1.0, 0.0, 1.0], np.float32)
    >>> cupyattn.gelu(x).round(4)
    array([-0.1587,  0.    ,  0.8413], dtype=float32)
    >>> cupyattn.gelu(x, approximate="tanh").round(4)
    array([-0.1588,  0.    ,  0.8412], dtype=float32)
    """
    return _activation(gelu_kind(approximate), x, out)


def gelu_backward(
    dout: Array,
    x: Array,
    /,
    *,
    approximate: str = "none",
    grads: Array | None = None,
    accumulate: bool = False,
) -> Array:
    r"""Gradient of `gelu`.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    x : array (..., N), dtype of dout
        As given to `gelu`.
    approximate : {"none", "tanh"}
        As given to `gelu`.
    grads : array (..., N), optional
        Where to write the gradient: dout or x itself, or memory that overlaps neither.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    array (..., N), dtype of x
        Gradient with respect to x.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`; for dout and x of different shapes or dtypes; for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.array([-1.0, 0.0, 1.0], np.float32)
    >>> cupyattn.gelu_backward(np.ones_like(x), x).round(4)
    array([-0.0833,  0.5   ,  1.0833], dtype=float32)
    """
    return _backward(gelu_kind(approximate), dout, x, grads, accumulate)


@differentiable(lambda: silu_backward, gradients=("dx",))
def silu(x: Array, /, *, out: Array | None = None) -> Array:
    r"""Sigmoid linear unit, or swish: ``x / (1 + exp(-x))``.

    Parameters
    ----------
    x : array (..., N)
        Dtypes and strides as `gelu` documents.
    out : array (..., N), optional
        Where to write the result: x itself, or memory that does not overlap it.

    Returns
    -------
    array (..., N), dtype of x
        -inf gives -0 and inf gives inf: the limits.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`.

    Notes
    -----
    Hendrycks and Gimpel, arXiv:1606.08415, section 4; Ramachandran, Zoph and Le, arXiv:1710.05941.
    Computed in float32, rounded once. Results nearer to 0 than 2**-118 (3e-36) may be 0, as `gelu`
    documents: silu(-88), which is -5e-37, is -0.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> cupyattn.silu(np.array([-1.0, 0.0, 1.0], np.float32)).round(4)
    array([-0.2689,  0.    ,  0.7311], dtype=float32)
    """
    return _activation("silu", x, out)


def silu_backward(
    dout: Array, x: Array, /, *, grads: Array | None = None, accumulate: bool = False
) -> Array:
    r"""Gradient of `silu`.

    Parameters
    ----------
    dout : array (..., N)
        Gradient with respect to the result.
    x : array (..., N), dtype of dout
        As given to `silu`.
    grads : array (..., N), optional
        Where to write the gradient: dout or x itself, or memory that overlaps neither.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    array (..., N), dtype of x
        Gradient with respect to x.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu_backward`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.array([-1.0, 0.0, 1.0], np.float32)
    >>> cupyattn.silu_backward(np.ones_like(x), x).round(4)
    array([0.0723, 0.5   , 0.9277], dtype=float32)
    """
    return _backward("silu", dout, x, grads, accumulate)


def gelu_kind(approximate: object) -> str:
    """Return the activation that a form of gelu is: "gelu" or "gelu_tanh".

    Raises
    ------
    TypeError, ValueError
        For anything but "none" and "tanh".
    """
    if isinstance(approximate, str) and approximate in _GELU:
        return _GELU[approximate]
    raise error(
        ValueError if isinstance(approximate, str) else TypeError,
        f"approximate = {shown(approximate)}",
        f"allowed are {', '.join(map(repr, _GELU))}",
        "pass 'none' for the exact gelu, 'tanh' for its approximation",
    )


def _activation(kind: str, x: Array, out: Array | None) -> Array:
    exact = partial(reference.activation, kind=kind)
    arrays = ActivationArrays(x, out)
    decided = {"ACTIVATION": ACTIVATIONS[kind]}
    fast = partial(cpu.activation, kind=kind)
    result = call_elements(FORWARD, arrays, exact, decided=decided, cpu=fast).out
    assert result is not None
    return result


def _backward(kind: str, dout: Array, x: Array, grads: Array | None, accumulate: bool) -> Array:
    exact = partial(reference.activation_backward, kind=kind)
    arrays = ActivationBackwardArrays(dout, x, grads)
    decided = {"ACTIVATION": ACTIVATIONS[kind]}
    dx = call_elements(
        BACKWARD,
        arrays,
        exact,
        decided=decided,
        accumulate=accumulate,
        cpu=partial(cpu.activation_backward, kind=kind),
    ).dx
    assert dx is not None
    return dx


@differentiable(lambda: swiglu_backward, gradients=GatedGrads._fields)
def swiglu(gate: Array, up: Array | None = None, /, *, out: Array | None = None) -> Array:
    r"""Gated linear unit with silu: ``silu(gate) * up``.

    Parameters
    ----------
    gate : array (..., N), or (..., 2N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride. Without `up` it is
        packed: its last axis contains gate, then up, as a product with the concatenated matrices
        gives them.
    up : array (..., N), dtype of gate, optional
        The factor that is gated.
    out : array (..., N), optional
        Where to write the result: gate or up itself, unless they are packed, or memory that
        overlaps neither.

    Returns
    -------
    array (..., N), dtype of gate

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`; for gate and up of different shapes or dtypes; for a packed array whose last
        axis has an odd length.

    Notes
    -----
    Shazeer, "GLU variants improve transformer", arXiv:2002.05202. Computed in float32, rounded
    once. A silu(gate) nearer to 0 than 2**-118 (3e-36) may count as 0, as `gelu` documents, however
    large up is.

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
        Arrays to write the gradients into: an input of the same shape itself, or memory that
        overlaps no input. For a field that is None an array is allocated.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    GatedGrads
        ``(dgate, dup)``. If gate is packed, dgate is packed too and dup is None.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu`; for a dout or grads of another shape or dtype; for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> gate, up = np.array([[0.0, 1.0], [3.0, 2.0]], np.float32)
    >>> dgate, dup = cupyattn.swiglu_backward(np.ones(2, np.float32), gate, up)
    >>> dgate.round(4), dup.round(4)
    (array([1.5   , 1.8553], dtype=float32), array([0.    , 0.7311], dtype=float32))
    """
    return _gated_backward("silu", dout, gate, up, grads, accumulate)


@differentiable(lambda: geglu_backward, gradients=GatedGrads._fields)
def geglu(
    gate: Array, up: Array | None = None, /, *, approximate: str = "none", out: Array | None = None
) -> Array:
    r"""Gated linear unit with gelu: ``gelu(gate) * up``.

    Parameters
    ----------
    gate : array (..., N), or (..., 2N)
        As `swiglu` documents; without `up` it is packed, gate then up.
    up : array (..., N), dtype of gate, optional
        The factor that is gated.
    approximate : {"none", "tanh"}
        The form of `gelu`.
    out : array (..., N), optional
        As `swiglu` documents.

    Returns
    -------
    array (..., N), dtype of gate

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu`; and for an unknown approximation.

    Notes
    -----
    Shazeer, "GLU variants improve transformer", arXiv:2002.05202. Computed in float32, rounded
    once. A gelu(gate) nearer to 0 than 2**-118 (3e-36) may count as 0, as `swiglu` documents.

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
        Arrays to write the gradients into, as `swiglu_backward` documents.
    accumulate : bool
        Add to the contents of grads instead of replacing them, before the one rounding.

    Returns
    -------
    GatedGrads
        ``(dgate, dup)``. If gate is packed, dgate is packed too and dup is None.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `swiglu_backward`; and for an unknown approximation.

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
    fast = partial(cpu.gated, kind=kind)
    result = call_elements(GATED, arrays, exact, parts=parts, decided=decided, cpu=fast).out
    assert result is not None
    return result


def _gated_backward(
    kind: str,
    dout: Array,
    gate: Array,
    up: Array | None,
    grads: GatedGrads | None,
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
        cpu=partial(cpu.gated_backward, kind=kind),
    )
    return GatedGrads(results.dgate, results.dup)


def add_to(total: Array, x: Array, /) -> None:
    r"""Add an array to a float32 sum in place: ``total += x``, in one pass over memory.

    Use it to add up gradients of several steps, or of several GPUs, without rounding to 16 bits.

    Parameters
    ----------
    total : float32 array of any shape
        The sum, which is changed in place. The last axis is contiguous; the others may have any
        stride.
    x : array of that shape
        float16, float32 or bfloat16; float64 too for NumPy arrays outside of the emulator. The last
        axis is contiguous. It is total itself, or does not overlap it.

    Returns
    -------
    None

    Raises
    ------
    TypeError
        For an argument that is not an array, NumPy and CuPy arrays mixed, or a dtype that is not
        allowed.
    ValueError
        For different shapes, a last axis that is not contiguous, or a total that is read-only or
        overlaps x. Kernels also refuse arrays whose axes before the last leave more than four axes
        after merging.
    RuntimeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> total = np.ones(3, np.float32)
    >>> cupyattn.add_to(total, np.array([1, 2, 2**-11], np.float16))
    >>> total
    array([2.       , 3.       , 1.0004883], dtype=float32)
    """
    call_elements(ADD_TO, AddToArrays(total, x), reference.add_to)
