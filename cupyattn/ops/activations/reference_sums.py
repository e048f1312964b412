"""Sums of arrays, and the bound of their kernel's error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cupyattn.runtime.precision import Float64, precision_of


def add_to(total: ArrayLike, x: ArrayLike) -> Float64:
    """Return total + x.

    Examples
    --------
    >>> add_to([1.0, 2.0], [0.5, 0.25])
    array([1.5 , 2.25])
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(total, np.float64) + np.asarray(x, np.float64)


def add_to_bound(total: ArrayLike, x: ArrayLike) -> Float64:
    """Error bound of `add_to`: the sum is rounded to float32 once."""
    return precision_of("float32").store(add_to(total, x))
