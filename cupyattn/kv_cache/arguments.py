"""Checks of counts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AnySet
from operator import index as as_int
from typing import Any, NoReturn

from cupyattn.runtime.errors import bool_fix, error, shown


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
    """Return a bool, or raise: other values are most likely meant for another argument."""
    if not isinstance(value, bool):
        raise error(
            TypeError, f"got {name} = {shown(value)}", "it is True or False", bool_fix(name, value)
        )
    return value


def as_tokens(tokens: Any) -> list[int]:
    """Return token ids from a list or an array, or raise; a bool is not a token."""
    try:
        if isinstance(tokens, AnySet | Mapping):
            raise TypeError("it has no order")
        values = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
        kinds = set(map(type, values))
        if bool in kinds:
            raise TypeError("a mask, most likely")
        return values if kinds <= {int} else [as_int(token) for token in values]
    except TypeError:
        raise error(
            TypeError,
            f"got tokens {shown(tokens)}",
            "tokens are integers, in a list or an array of one axis",
            "pass [token] for one",
        ) from None


def as_ends(stop: object) -> list[int]:
    """Read the tokens that end a sample, of which a set will do."""
    try:
        return as_tokens(list(stop) if isinstance(stop, AnySet) else stop)
    except TypeError:
        raise error(
            TypeError,
            f"got stop = {shown(stop)}",
            "it is the tokens that end a sample, integers in a list, an array or a set",
            "pass [token] for one, and () for none",
        ) from None


def as_copies(copies: Any, sources: int, targets: int) -> tuple[tuple[int, int], ...]:
    """Read copies of blocks, or refuse all of them for one that is none, or of no block."""
    try:
        items = tuple(copies.tolist() if hasattr(copies, "tolist") else copies)
        pairs = [(src, dst) for src, dst in items]
    except (TypeError, ValueError):
        raise error(
            TypeError,
            f"got copies {shown(copies)}",
            "they are a list of Copy(src, dst), or of other pairs of block ids",
            "pass copies that append, swap_out or swap_in of a sequence returned, [copy] for one",
        ) from None
    if pairs and not (sources and targets):
        raise error(
            ValueError,
            f"got {len(pairs)} copies",
            "the cache has no blocks in host memory",
            "make it with num_host_blocks=",
        )
    return tuple(
        (
            as_count(f"src of copies[{number}]", src, 0, sources - 1),
            as_count(f"dst of copies[{number}]", dst, 0, targets - 1),
        )
        for number, (src, dst) in enumerate(pairs)
    )


def uncopied(copy: str, instead: str) -> Callable[[Any, Any], NoReturn]:
    """Make the ``__reduce_ex__`` of a class that is neither copied nor pickled."""

    def refuse(self: object, protocol: object) -> NoReturn:
        name = type(self).__name__
        raise error(TypeError, f"a {name} was to be copied or pickled", copy, instead)

    return refuse
