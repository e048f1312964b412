"""Whole numbers that a training is told."""

from __future__ import annotations

from operator import index
from typing import Any

from cupyattn.errors import error, shown


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
