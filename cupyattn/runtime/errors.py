"""Error messages in three parts: what was passed, what is allowed, how to fix it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar, TypeVar

_Error = TypeVar("_Error", bound=Exception)

_LONGEST = 500  # characters of what was passed; the library itself writes at most about 300
_MOST_BITS = 256  # Python refuses to print integers of more than about 4000 digits


class RefusalError(TypeError):
    """An error that our own objects raise when they are used as arrays. It is never rewrapped."""


def error(kind: type[_Error], passed: str, allowed: str, fix: str) -> _Error:
    """Make an exception whose message has the three parts, separated by semicolons.

    Examples
    --------
    >>> error(ValueError, "got D = 600", "head dims are 1 to 512", "split the head")
    ValueError('got D = 600; head dims are 1 to 512; split the head')
    """
    if len(passed) > _LONGEST:
        passed = f"{passed[: _LONGEST // 2]} ... {passed[-_LONGEST // 4 :]}"
    return kind(f"{passed}; {allowed}; {fix}")


class NotAnArray:
    """The base of quantised objects that hold several arrays, and refuse to be taken for one."""

    __slots__ = ()

    NOT_AN_ARRAY: ClassVar[tuple[str, str]]
    """The second and third part of the error: what takes such an object, what to do instead."""

    __iter__ = None  # otherwise a loop would try [0], [1], ... and end at the first error

    def __array__(self, *_: Any, **__: Any) -> Any:
        """Refuse: NumPy would treat the object as a sequence without items."""
        raise self._no_array()

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Refuse to be taken as an array by another library."""
        raise self._no_array()

    def __dlpack_device__(self) -> Any:
        """Refuse to be taken as an array by another library."""
        raise self._no_array()

    def _no_array(self) -> RefusalError:
        return error(RefusalError, f"got {self!r} as an array", *self.NOT_AN_ARRAY)


MADE_BEFOREHAND = "make a writable, C-contiguous array before the call, pass it as {} and read that"
"""The fix for results that cannot be written: a copy made in the call would be written and lost."""


def made_beforehand(name: str) -> str:
    """Return advice for an output array: a copy made in the call would be written and lost."""
    return f"make a writable, C-contiguous array before the call, pass it as {name} and read that"


def bool_fix(name: str, value: object) -> str:
    """Return advice for a value that is not a bool; bool("False") would be True."""
    return f"convert it with bool({name})" if isinstance(value, Real) else "pass one of these"


@contextmanager
def explaining(passed: str, allowed: str, fix: str | Callable[[], str]) -> Iterator[None]:
    """Rewrite an OSError within the block to three parts; it keeps its class and number.

    `fix` may be a function, which is called only on an error. If blocks are nested, the message has
    the parts of the outermost block, which knows better what was meant.

    Examples
    --------
    >>> with explaining("no notes", "they are kept in notes.txt", "pass another folder"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: no notes ([Errno 28] No space left on device); they are kept in notes.txt; pass ...
    """
    try:
        yield
    except OSError as failure:
        plain = failure.__cause__ if isinstance(failure.__cause__, OSError) else failure
        advice = fix if isinstance(fix, str) else fix()
        explained = error(type(failure), f"{passed} ({plain})", allowed, advice)
        explained.errno = failure.errno
        raise explained from plain


def size_text(count: int) -> str:
    """Format a number of bytes.

    Examples
    --------
    >>> size_text(3_600_000_000), size_text(12_345_678), size_text(89_000)
    ('3.60 GB', '12.3 MB', '89.0 kB')
    """
    for unit, size, digits in (("GB", 1e9, 2), ("MB", 1e6, 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count / 1e3:.1f} kB"


def shown(value: object) -> str:
    """Format a value that the caller passed: its repr, shortened to about a hundred characters.

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
        """Format an array of NumPy or CuPy without reading its items."""
        return f"<array {x.dtype.name} {x.shape}>"


_short = _Short()
