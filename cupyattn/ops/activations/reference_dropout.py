"""Dropout, replayed from its seed, and the bound of its kernel's error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.runtime.philox import element_keep
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of


def dropout(x: ArrayLike, p: float, seed: int, residual: ArrayLike | None = None) -> Float64:
    """Return x / (1 - p) where an item is kept and 0 where not, plus the residual.

    p is first rounded to what the mask drops, a multiple of 1/65536; of 1 nothing is kept.

    It is its own gradient: that of x is ``dropout(dout, p, seed)``.

    Examples
    --------
    >>> dropout(np.arange(8.0), 0.5, 0)
    array([ 0.,  2.,  4.,  6.,  0., 10.,  0.,  0.])
    """
    x = np.asarray(x, dtype=np.float64)
    kept = (
        element_keep(seed, p, np.arange(x.size)).reshape(x.shape) if p else np.ones(x.shape, bool)
    )
    kept_share = 1 - round(65536 * p) / 65536  # that of `element_keep`: the expectation is x
    with np.errstate(over="ignore", invalid="ignore"):
        out: Float64 = np.where(kept, x / (kept_share or 1.0), 0.0)
        return out if residual is None else out + np.asarray(residual, dtype=np.float64)


def dropout_bound(
    x: ArrayLike, p: float, seed: int, residual: ArrayLike | None = None, *, dtype: DTypeLike
) -> Float64:
    """Error bound of `dropout`: the scale and the product are rounded, and the sum."""
    exact = dropout(x, p, seed, residual)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = 2 * np.abs(dropout(x, p, seed)) + np.abs(exact)
        return U32 * terms + precision_of(dtype).store(exact) + TINY32
