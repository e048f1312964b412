"""The form of every error: what was passed, what is allowed, how to fix it."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound=Exception)

_LONGEST = 500  # characters of what was passed; the longest that the library writes has some 300
_MOST_BITS = 256  # Python refuses to write integers of more than some 4000 digits


class RefusalError(TypeError):
    """What an argument of ours says about its own use: passed on as it is, wherever it arises."""


def error(kind: type[_Error], passed: str, allowed: str, fix: str) -> _Error:
    """Make an exception whose message has the three parts.

    Examples
    --------
    >>> error(ValueError, "got D = 300", "head dims are 1 to 256", "split the head")
    ValueError('got D = 300; head dims are 1 to 256; split the head')
    """
    if len(passed) > _LONGEST:
        passed = f"{passed[: _LONGEST // 2]} ... {passed[-_LONGEST // 4 :]}"
    return kind(f"{passed}; {allowed}; {fix}")


def made_beforehand(name: str) -> str:
    """Say what to pass to be written. A copy made in the call would be written and lost."""
    return f"make a writable, C-contiguous array before the call, pass it as {name} and read that"


def shown(value: object) -> str:
    """Write a value that the caller passed: its repr, in at most some hundred characters.

    Examples
    --------
    >>> shown("yes"), shown([0.5] * 100_000)
    ("'yes'", '[0.5, 0.5, 0.5, 0.5, ...]')
    """
    return _short.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 4
        self.maxstring = 60
        self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= _MOST_BITS else f"<int of {bits} bits>"

    def repr_ndarray(self, x: Any, level: int) -> str:
        """Write an array of NumPy or CuPy without looking at its items."""
        return f"<array {x.dtype.name} {x.shape}>"


_short = _Short()
