"""Counts and tokens as they come in."""

from __future__ import annotations

from operator import index as as_int
from typing import Any

from cupyattn.errors import error, shown


def as_count(name: str, value: int, lowest: int, highest: int | None = None) -> int:
    """Read an integer within limits; a bool is none here."""
    limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
    try:
        number = None if isinstance(value, bool) else as_int(value)
    except TypeError:
        number = None
    if number is None:
        raise error(
            TypeError, f"got {name} = {shown(value)}", f"it is an integer, {limits}", "pass an int"
        )
    if number < lowest or (highest is not None and number > highest):
        raise error(
            ValueError, f"got {name} = {shown(number)}", f"allowed is {limits}", "pass one of those"
        )
    return number


def as_switch(name: str, value: bool) -> bool:
    """Read what is True or False: other values are most likely another argument's."""
    if not isinstance(value, bool):
        raise error(
            TypeError,
            f"got {name} = {shown(value)}",
            "it is True or False",
            f"convert it with bool({name})",
        )
    return value


def as_tokens(tokens: Any) -> list[int]:
    """Read token ids from a list or an array, or refuse what is neither."""
    try:
        return [
            as_int(token) for token in (tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        ]
    except TypeError:
        raise error(
            TypeError,
            f"got tokens {shown(tokens)}",
            "tokens are integers, in a list or an array of one axis",
            "pass [token] for one",
        ) from None
