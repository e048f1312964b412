"""Unit round-offs of the kernels' dtypes, from which every error bound is computed.

u_in is the round-off of the inputs of a tensor core, u_out that of the results. Each has an
absolute error `tiny`: half a subnormal's spacing in float16, and in float32 the subnormal numbers
that -ftz=true flushes to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
U32 = 2.0**-24  # unit round-off of float32
TINY32 = 2.0**-126


@dataclass(frozen=True)
class Precision:
    """Unit round-offs of a kernel for one dtype."""

    u_in: float
    tiny_in: float
    u_out: float
    tiny_out: float

    def store(self, result: Float64) -> Float64:
        """Return the error of rounding results to the output's dtype."""
        return self.u_out * np.abs(result) + self.tiny_out


_PRECISIONS = {
    "float16": Precision(u_in=2.0**-11, tiny_in=2.0**-25, u_out=2.0**-11, tiny_out=2.0**-25),
    "float32": Precision(u_in=U32, tiny_in=TINY32, u_out=U32, tiny_out=TINY32),
    # Of float32 arithmetic, with bfloat16 only at the store. Where tensor cores take bfloat16
    # (sm_80 and later), a family's bounds.py adds what they round before.
    "bfloat16": Precision(u_in=U32, tiny_in=TINY32, u_out=2.0**-8, tiny_out=TINY32),
}


def precision_of(dtype: DTypeLike) -> Precision:
    """Return the precision of kernels for a dtype, which is given as a dtype or by name."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _PRECISIONS:
        raise ValueError(
            f"no error bounds for dtype {name!r}; there are some for {', '.join(_PRECISIONS)}: "
            "pass the dtype that the kernel under test was given"
        )
    return _PRECISIONS[name]


def flushed(x: Float32) -> Float32:
    """Return numbers with subnormal ones replaced by 0, as -ftz=true does.

    Examples
    --------
    >>> flushed(np.float32([1.0, -1e-39, np.inf]))
    array([ 1.,  0., inf], dtype=float32)
    """
    return np.where(np.abs(x) < TINY32, np.float32(0), x)


def error_ratio(actual: ArrayLike, reference: ArrayLike, bound: ArrayLike) -> float:
    """Return the largest of `error_ratios`. It is at most 1 for a correct kernel, and 0 of nothing.

    Examples
    --------
    >>> error_ratio([1.0, np.nan, -np.inf], [1.5, np.nan, -np.inf], [1.0, 0.0, 0.0])
    0.5
    """
    actual, reference = in_float64(actual), in_float64(reference)
    if actual.shape != reference.shape:
        raise ValueError(
            f"actual has shape {actual.shape} and reference {reference.shape}; "
            "pass arrays of one shape: a broadcast comparison would hide a wrong one"
        )
    return float(np.max(error_ratios(actual, reference, bound), initial=0.0))


def in_float64(array: ArrayLike) -> Float64:
    """Return results in float64, without a warning for signalling NaNs in unwritten memory."""
    with np.errstate(invalid="ignore"):
        return np.asarray(array, np.float64)


def error_ratios(actual: Float64, reference: Float64, bound: ArrayLike) -> Float64:
    """Return |actual - reference| / bound of each element.

    The ratio is 0 where both are the same, also NaN or the same infinity, and where the reference
    is NaN and the bound infinite: nothing is promised there. It is infinite where otherwise exactly
    one is not finite, where they are different infinities, and where they differ and the bound is
    0.
    """
    limit = np.asarray(bound, np.float64)
    nothing = np.isnan(reference)
    same = (actual == reference) | (nothing & (np.isnan(actual) | np.isposinf(limit)))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.where(same, 0.0, np.abs(actual - reference) / limit)
    return np.where(np.isnan(ratio), np.inf, ratio)
