"""Validation of numbers in the options of a training."""

from __future__ import annotations

import math
from numbers import Real

from cupyattn.runtime.errors import error, shown

LARGEST = 1e38  # of what kernels take in float32


def as_float(given: object) -> float:
    """Return a real number of any type as a float; NaN for anything else.

    >>> as_float(3), as_float("3")
    (3.0, nan)
    """
    if not isinstance(given, Real) or isinstance(given, bool):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.inf  # of either sign: nothing takes it


def positive_number(name: str, given: object, *, allowed: str = "", example: float = 1.0) -> float:
    """Return a positive number within float32, or raise; `allowed` is what else may be."""
    number = as_float(given)
    if 0 < number <= LARGEST:
        return number
    raise error(
        ValueError,
        f"{name} = {shown(given)}",
        f"it is a positive number up to {LARGEST:g}{allowed}",
        f"pass for example {example:g}",
    )
