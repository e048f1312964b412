"""Rounding of the reference's float64 results to the dtype of the output."""

from __future__ import annotations

from typing import overload

import numpy as np

from cupyattn.runtime.arrays import Array


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
        if dtype.name == "bfloat16":  # ml_dtypes converts through float32, which would round twice
            exact = _float32_to_odd(exact)
        target[...] = exact.astype(dtype)
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
