"""The methods of text, numbers and containers that chat templates may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinMethodType, ModuleType
from typing import Any

from cupyattn.models.tokenizer.template_budget import Budget, ExceededError

_SEARCHED = (
    1 << 30
)  # to search from the right, or to strip, takes the product of both lengths at worst

_PLAIN = """capitalize casefold endswith isalnum isalpha isascii isdecimal isdigit isidentifier
islower isnumeric isprintable isspace istitle isupper lower removeprefix removesuffix splitlines
startswith swapcase title upper"""


def require_method(budget: Budget, method: Any, given: tuple[Any, ...], named: dict) -> tuple:
    """Check a call of a method of Python's own types; return its positional arguments.

    Raises
    ------
    ExceededError
        If it is none for templates, or its result would be too long.
    """
    owner = getattr(method, "__self__", None)
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
    written_in_c = isinstance(method, BuiltinMethodType)
    if kind is None:
        if written_in_c and type(owner).__module__ == "builtins" and not _is_module(owner):
            raise ExceededError(f"it calls {type(owner).__name__}.{method.__name__}")
        return given
    if not (written_in_c or kind is str):  # of a class of the caller's own
        return given
    if method.__name__ not in _METHODS[kind]:
        raise ExceededError(f"it calls {kind.__name__}.{method.__name__}")
    check = _METHODS[kind][method.__name__]
    return given if check is None else check(budget, owner, *given, **named)


def _is_module(owner: Any) -> bool:
    return isinstance(owner, ModuleType)


def require_replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> tuple:
    """Refuse a replacement whose result would be too long."""
    found = text.count(old)
    times = min(found, count) if count >= 0 else found
    budget.require_room(len(text) + times * len(new))
    return (old, new, count)


def joined(budget: Budget, glue: str, parts: Iterable[Any]) -> list[Any]:
    """Return the parts of a text that is not too long."""
    found = budget.listed(parts)
    budget.require_room(budget.size(found) + len(glue) * len(found))
    return found


def require_stripped(budget: Budget, text: str, characters: Any = None) -> tuple:
    """Refuse to strip too many characters from too long a text."""
    return _search(budget, text, characters)


def _join(budget: Budget, glue: str, parts: Iterable[Any]) -> tuple:
    return (joined(budget, glue, parts),)


def _width(budget: Budget, text: str, width: int, *fill: str) -> tuple:
    budget.require_room(width)
    return (width, *fill)


def _tabs(budget: Budget, text: str, tabsize: int = 8) -> tuple:
    budget.require_room(len(text) + text.count("\t") * max(tabsize, 0))
    return (tabsize,)


def _search(budget: Budget, text: str, part: Any = "", *given: Any) -> tuple:
    if isinstance(part, str) and len(text) * len(part) > _SEARCHED:
        raise ExceededError("it looks for too long a text in too long a text")
    return (part, *given)


def _split(budget: Budget, text: str, sep: Any = None, maxsplit: int = -1, **_: Any) -> tuple:
    return (*_search(budget, text, sep), maxsplit)


def _named(names: str, check: Callable[..., tuple] | None = None) -> dict[str, Any]:
    return dict.fromkeys(names.split(), check)


_METHODS: dict[type, dict[str, Any]] = {
    str: {
        **_named(_PLAIN),
        **_named("find index rfind rindex count partition rpartition", _search),
        **_named("lstrip rstrip strip", require_stripped),
        "split": _split,
        "rsplit": _split,
        "replace": require_replaced,
        "join": _join,
        **_named("center ljust rjust zfill", _width),
        "expandtabs": _tabs,
    },
    bytes: {},
    int: _named("bit_length is_integer"),
    float: _named("is_integer"),
    list: _named("copy count index"),
    tuple: _named("count index"),
    dict: _named("copy get items keys values"),
}
