"""Numbers among the options of a call, as Python has them."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

from cupyattn.runtime.errors import error, shown

LARGEST = 1e38  # times log2(e) it is still a float32
_NO_NUMBERS = (bool, np.timedelta64)  # integers to Python's and NumPy's classes, but not here


def real(name: str, value: Any) -> float:
    """Return an option as a float, or raise TypeError."""
    if type(value) is float:  # most are: asking for the class Real takes a microsecond
        return value
    if isinstance(value, Real) and not isinstance(value, _NO_NUMBERS):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # of either sign: no option takes it
    raise error(
        TypeError,
        f"{name} is a {type(value).__name__}",
        "it is a real number",
        _conversion(value, "float"),
    )


def factor(name: str, value: Any, *, least: float = -math.inf) -> float:
    """Return a factor as a float, or raise: it is finite, with some room, and not below `least`."""
    number = real(name, value)
    if not abs(number) <= LARGEST:
        raise error(
            ValueError,
            f"{name} = {number}",
            f"it is a finite number up to {LARGEST:g}",
            "pass a smaller number",
        )
    if number < least:
        raise error(
            ValueError, f"{name} = {number}", f"it is {least:g} or more", "pass such a number"
        )
    return number


def integer(
    name: str,
    value: Any,
    allowed: str = "it is an integer",
    fix: str = "",
) -> int:
    """Return an option as an int, or raise TypeError."""
    if type(value) is int:  # as of real
        return value
    if isinstance(value, Integral) and not isinstance(value, _NO_NUMBERS):
        return int(value)
    raise error(
        TypeError,
        f"{name} is {shown(value)}, a {type(value).__name__}",
        allowed,
        fix or _conversion(value, "int"),
    )


def _conversion(value: Any, kind: str) -> str:
    # Python's int and float make no number of several.
    several = isinstance(value, list | tuple) or getattr(value, "shape", ()) != ()
    return "pass one number" if several else f"convert it with {kind}(...)"
