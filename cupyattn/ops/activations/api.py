"""Activations, forward and backward."""

from __future__ import annotations

from functools import partial

from cupyattn.ops.activations import reference
from cupyattn.ops.activations.kernels import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    ActivationArrays,
    ActivationBackwardArrays,
)
from cupyattn.runtime.arrays import Array
from cupyattn.runtime.call_elements import call_elements
from cupyattn.runtime.errors import error, shown

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def gelu(x: Array, /, *, approximate: str = "none", out: Array | None = None) -> Array:
    r"""Gaussian error linear unit: ``x * Phi(x)`` with the normal distribution function Phi.

    Parameters
    ----------
    x : array (..., N)
        float16, float32 or bfloat16, CuPy or NumPy; float64 on NumPy arrays outside of the
        emulator. The last axis is contiguous; the others may have any stride.
    approximate : {"none", "tanh"}
        "none": exact, ``x * (1 + erf(x / sqrt(2))) / 2``. "tanh": the approximation ``x * (1 +
        tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``, as GPT-2 has it.
    out : array (..., N), optional
        Where to write the result: x itself, or memory that does not overlap it.

    Returns
    -------
    array (..., N), dtype of x
        -inf gives -0 and inf gives inf, the limits.

    Raises
    ------
    TypeError
        For something that is no array, NumPy and CuPy arrays mixed, or a dtype that is not allowed.
    ValueError
        For another approximation, a last axis that is not contiguous, or an out that does not fit
        or overlaps x and is not x; for kernels also if more than four axes before the last lie
        unevenly in memory.
    RuntimeError
        As `attention`.

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian error linear units", arXiv:1606.08415. float32 inside, one
    rounding. Small results, far to the left, keep their relative accuracy, which ``1 + erf`` and
    ``1 + tanh`` lose by cancellation, down to 2**-118 (3e-36). Nearer to 0 a result may be 0,
    because float32 exponentials are flushed to 0 below 2**-126: gelu(-13), which is -8e-38, is -0.
    The gradient has the same limit before it is multiplied by dout. float64 arrays have none.

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
        As `gelu`; for shapes or dtypes of dout and x that differ; and for accumulate without grads.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> x = np.array([-1.0, 0.0, 1.0], np.float32)
    >>> cupyattn.gelu_backward(np.ones_like(x), x).round(4)
    array([-0.0833,  0.5   ,  1.0833], dtype=float32)
    """
    return _backward(gelu_kind(approximate), dout, x, grads, accumulate)


def silu(x: Array, /, *, out: Array | None = None) -> Array:
    r"""Sigmoid linear unit, or swish: ``x / (1 + exp(-x))``.

    Parameters
    ----------
    x : array (..., N)
        As `gelu` takes it.
    out : array (..., N), optional
        Where to write the result: x itself, or memory that does not overlap it.

    Returns
    -------
    array (..., N), dtype of x
        -inf gives -0 and inf gives inf, the limits.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `gelu`.

    Notes
    -----
    Hendrycks and Gimpel, arXiv:1606.08415, section 4; Ramachandran, Zoph and Le,
    arXiv:1710.05941. float32 inside, one rounding. Results nearer to 0 than 2**-118 (3e-36) may be
    0, as of `gelu`: silu(-88), which is -5e-37, is -0.

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
    """Return which gelu, by its name among activations.

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
    return call_elements(FORWARD, arrays, exact, decided=decided).out


def _backward(kind: str, dout: Array, x: Array, grads: Array | None, accumulate: bool) -> Array:
    exact = partial(reference.activation_backward, kind=kind)
    arrays = ActivationBackwardArrays(dout, x, grads)
    decided = {"ACTIVATION": ACTIVATIONS[kind]}
    return call_elements(BACKWARD, arrays, exact, decided=decided, accumulate=accumulate).dx
