"""The form of every error: what was passed, what is allowed, how to fix it."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def error(kind: type[_Error], passed: str, allowed: str, fix: str) -> _Error:
    """Make an exception whose message has the three parts.

    Examples
    --------
    >>> error(ValueError, "got D = 300", "head dims are 1 to 256", "split the head")
    ValueError('got D = 300; head dims are 1 to 256; split the head')
    """
    return kind(f"{passed}; {allowed}; {fix}")
