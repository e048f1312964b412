"""Regular expressions of module names, within a limit on time: they come with files of adapters.

Python's own engine backtracks without end on patterns such as ``(a+)+b``, and cannot be stopped.
The package regex understands the same patterns, lookaheads among them, and takes a time limit.
"""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from typing import Any

from cupyattn.models.extras import extra
from cupyattn.runtime.errors import error, shown

SECONDS = 2.0
"""The time for all matches of one set of patterns; 500 modules take some milliseconds."""

_MOST_CHARACTERS = 1 << 16
_MOST_PAIRS = 1 << 20
_MOST_REPEATS = 1000  # regex makes a copy of what is repeated for each time that it has to match
_SLOW = 1e-3  # a match of less time costs nothing: most take a microsecond
_LEAST_COUNT = re.compile(r"\{(\d+)")
_REPEATS = re.compile(r"[*+?{|(]")


def require_pattern(pattern: Any, *, last_parts: bool) -> None:
    """Raise ValueError for what is no regular expression of whole names, or of last parts."""
    failure: Exception
    try:
        if len(pattern) > _MOST_CHARACTERS:
            raise ValueError(f"{len(pattern)} characters; at most {_MOST_CHARACTERS} are read")
        if math.prod(max(int(count), 1) for count in _LEAST_COUNT.findall(pattern)) > _MOST_REPEATS:
            raise ValueError(f"it repeats more than {_MOST_REPEATS} times, counts multiplied")
        re.compile(_whole(pattern, last_parts))  # regex accepts more, of which PEFT knows nothing
        _compiled(pattern, last_parts)
        return
    except RuntimeError as missing:
        if not isinstance(missing, RecursionError):
            raise
        failure = missing
    except Exception as other:  # of both packages, which raise OverflowError and MemoryError too
        failure = other
    raise error(
        ValueError,
        f"the pattern {shown(pattern)} ({failure})",
        "modules are named by their last parts or by a regular expression",
        "pass for example ['q_proj', 'v_proj']",
    ) from failure


@lru_cache(maxsize=16)
def matcher(patterns: tuple[str, ...], *, last_parts: bool) -> Matcher:
    """Return what matches these patterns, the same one each time.

    `last_parts` lets a pattern match the last parts of a name as well as the whole name.
    """
    return Matcher(patterns, last_parts)


class Matcher:
    """A set of patterns to match with names; all matches together have `SECONDS`."""

    def __init__(self, patterns: tuple[str, ...], last_parts: bool) -> None:
        self._compiled = {pattern: _compiled(pattern, last_parts) for pattern in patterns}
        self._known: dict[tuple[str, str], bool] = {}
        self._left = SECONDS

    def matches(self, pattern: str, name: str) -> bool:
        """Tell whether a pattern matches a name.

        Raises
        ------
        ValueError
            If that takes too long.
        """
        pair = pattern, name
        if pair not in self._known:
            if len(self._known) == _MOST_PAIRS:
                raise _too_slow(pattern, f"{_MOST_PAIRS} matches of patterns and modules")
            self._known[pair] = self._match(pattern, name)
        return self._known[pair]

    def _match(self, pattern: str, name: str) -> bool:
        compiled, limited = self._compiled[pattern]
        if not limited:
            return compiled.fullmatch(name) is not None
        began = time.perf_counter()
        try:
            if self._left <= 0:
                raise TimeoutError
            return compiled.fullmatch(name, timeout=self._left) is not None
        except (TimeoutError, MemoryError, RecursionError) as failure:
            self._left = 0
            raise _too_slow(pattern, f"more than {SECONDS:g} s") from failure
        finally:
            taken = time.perf_counter() - began
            if taken > _SLOW:
                self._left -= taken


def _compiled(pattern: str, last_parts: bool) -> tuple[Any, bool]:
    """Return a compiled pattern, and whether its matches take a limit: without repeats none do."""
    whole = _whole(pattern, last_parts)
    if not _REPEATS.search(pattern):
        return re.compile(whole), False
    return extra("regex", "matches patterns of modules").compile(whole), True


def _whole(pattern: str, last_parts: bool) -> str:
    return rf"(?:.*\.)?(?:{pattern})" if last_parts else pattern


def _too_slow(pattern: str, taken: str) -> ValueError:
    return error(
        ValueError,
        f"the pattern {shown(pattern)} takes {taken} to match modules",
        "a pattern of modules is matched in microseconds",
        "pass a list of names, or a pattern without repeats within repeats",
    )
