"""Results as the caller wants them: out=, grads=, dtype=, and conversions on the CPU."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from cupyattn.runtime.arrays import Array, dtype_of
from cupyattn.runtime.checks import CPU_FLOATS
from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.precision import Float32
from cupyattn.runtime.records import R


def named_out(out: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arrays of out=, one array or a tuple of several, by the names of the results.

    Raises
    ------
    TypeError
        If there are more or fewer arrays than results, or None among several.
    """
    if out is None:
        return {}
    if len(names) == 1 and not isinstance(out, tuple):
        return {names[0]: out}
    if isinstance(out, tuple) and len(out) == len(names) > 1 and all(a is not None for a in out):
        return dict(zip(names, out, strict=True))
    kind = type(out).__name__
    passed = f"out is a tuple of {len(out)}" if isinstance(out, tuple) else f"out has type {kind}"
    if len(names) == 1:
        raise error(TypeError, passed, "this call has one result", "pass one array")
    listed = ", ".join(names)
    raise error(
        TypeError,
        passed,
        f"it must be a tuple of arrays, one for each of the {len(names)} results of this call",
        f"pass out=({listed})",
    )


def named_grads(
    kind: type[Any], grads: object, accumulate: bool, fields: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the arrays of grads=, a named tuple of this kind, by name.

    `fields` are those that error messages propose, by default all.

    Raises
    ------
    TypeError
        If `grads` is anything else.
    ValueError
        If `accumulate` is True without `grads`.
    """
    fix = f"pass grads={kind.__name__}({', '.join(fields or kind._fields)})"
    if isinstance(grads, kind):
        return dict(grads._asdict())
    if grads is not None:
        article = "an" if kind.__name__.startswith(("A", "RMS")) else "a"
        raise error(
            TypeError,
            f"grads has type {type(grads).__name__}",
            f"it must be {article} {kind.__name__} of {', '.join(kind._fields)}: arrays or None",
            fix,
        )
    require_grads(grads, accumulate, fix)
    return {}


def take_out(arrays: R, out: object, names: tuple[str, ...]) -> R:
    """Put the arrays of out= into a record's fields: one array, or a tuple of several.

    Raises
    ------
    TypeError
        If there are more or fewer arrays than names, or None among several.
    """
    if out is None:
        return arrays
    for name, array in named_out(out, names).items():
        setattr(arrays, name, array)
    return arrays


def take_grads(arrays: R, kind: type[object], grads: object, accumulate: bool) -> R:
    """Put the arrays of grads=, a named tuple of this kind, into a record's fields.

    Raises
    ------
    TypeError, ValueError
        As `named_grads`.
    """
    if grads is None and not accumulate:
        return arrays
    for name, array in named_grads(kind, grads, accumulate).items():
        setattr(arrays, name, array)
    return arrays


def require_grads(
    grads: object, accumulate: bool, fix: str = "pass an array to add to", shown: str = "grads"
) -> None:
    """Raise ValueError for accumulate=True without gradients; `shown` names them in the error."""
    if accumulate and grads is None:
        passed = f"accumulate=True without {shown}"
        raise error(ValueError, passed, f"it adds to what is in {shown}", fix)


@overload
def round_into(
    given: None, exact: np.ndarray, dtype: np.dtype, *, transposed: bool = False
) -> np.ndarray: ...
@overload
def round_into(
    given: Array | None, exact: np.ndarray, dtype: np.dtype, *, transposed: bool = False
) -> Array: ...
def round_into(
    given: Array | None, exact: np.ndarray, dtype: np.dtype, *, transposed: bool = False
) -> Array:
    """Round once, into the given array or a new one. Values too large for the dtype become inf.

    A new array is in C order, or with `transposed` the transpose of an array in C order.
    """
    target = given
    if target is None:
        target = np.empty(exact.shape, dtype, order="F" if transposed else "C")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype.kind == "V" and exact.dtype == np.float64:
            # bfloat16: ml_dtypes converts through float32, which would round twice
            exact = _float32_to_odd(exact)
        target[...] = exact if exact.dtype == dtype else exact.astype(dtype)
    return target


def _float32_to_odd(exact: np.ndarray) -> np.ndarray:
    """Round to float32, to the odd neighbour if inexact, so that a second rounding does no harm.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd" (IEEE Transactions on Computers, 2008).
    """
    nearest = exact.astype(np.float32)
    bits = nearest.view(np.uint32)
    wide = nearest.astype(np.float64)
    inexact = (wide != exact) & ~np.isnan(exact)
    bits -= inexact & (np.abs(wide) > np.abs(exact))  # towards zero
    bits |= inexact
    return nearest


def widened(x: NDArray[Any]) -> Float32:
    """Return an array as float32: itself if it is one.

    Examples
    --------
    >>> import ml_dtypes
    >>> widened(np.array([1.5, -2.0], ml_dtypes.bfloat16))
    array([ 1.5, -2. ], dtype=float32)
    """
    if x.dtype == np.float32:
        return x
    if x.dtype.kind == "V":  # bfloat16
        wide = x.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return x.astype(np.float32)


def float_dtype(given: Any) -> np.dtype:
    """Return a floating-point dtype that is given as a dtype, a name or a scalar type.

    Raises
    ------
    TypeError
        For anything else.
    """
    try:
        dtype = dtype_of(given) if isinstance(given, str) else np.dtype(given)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name not in CPU_FLOATS:
        raise error(
            TypeError,
            f"dtype = {shown(given)}",
            f"allowed are {', '.join(CPU_FLOATS)}",
            "pass one of them, 'float32' most often",
        )
    return dtype
