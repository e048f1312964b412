"""Numbers that a training is told, as JSON keeps them: Python's own."""

from __future__ import annotations

import math
from numbers import Real
from operator import index
from typing import Any

from cupyattn.runtime.errors import error, shown

LARGEST = 1e38  # of what kernels take in float32


def count_of(name: str, given: Any, *, least: int) -> int:
    """Return an integer of `least` or more, or raise.

    Examples
    --------
    >>> count_of("seed", 3, least=0)
    3

    Raises
    ------
    TypeError, ValueError
        For something else, and for less.
    """
    try:
        number = index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool):
        kind: type[Exception] = TypeError
    elif number < least:
        kind = ValueError
    else:
        return number
    raise error(
        kind,
        f"{name} = {shown(given)}",
        f"it is an integer of {least} or more",
        f"pass for example {name}={max(least, 1)}",
    )


def as_float(given: object) -> float:
    """Return a real number of any kind as a float; NaN for what is none.

    Examples
    --------
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
    """Return a positive number that float32 holds too, or raise; `allowed` is what else may be.

    Examples
    --------
    >>> positive_number("clip", 2)
    2.0

    Raises
    ------
    ValueError
        For anything else.
    """
    number = as_float(given)
    if 0 < number <= LARGEST:
        return number
    raise error(
        ValueError,
        f"{name} = {shown(given)}",
        f"it is a positive number up to {LARGEST:g}{allowed}",
        f"pass for example {example:g}",
    )
