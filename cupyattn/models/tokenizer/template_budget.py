"""How much one run of a chat template may compute: time, sizes of its values, and depth."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

SECONDS = 10.0
MOST_BITS = 1024  # of an integer: as many as the largest float64 has
MOST_DEPTH = 64  # of containers in containers, and of macros that call macros
_LEAST, _TIMES = 1 << 22, 8
_LEAST_ALL, _TIMES_ALL = 1 << 28, 256
_ELEMENT = 16  # what a reference and a small object cost, in characters
_MOST_WIDTH = 999

TemplateValue = Any
"""A value of a template: it may have any type."""

_EMPTY: dict[str, str] = {}
_VIEWS: tuple[type, ...] = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS: Any = (dict, list, tuple, set, frozenset, *_VIEWS)
_CONVERSION = re.compile(r"%(?:\([^()]*\))?([^a-zA-Z%]*)[a-zA-Z%]?")


class ExceededError(Exception):
    """Raised where a template would take more than it may."""


class TemplateBudget:
    """The time and the sizes of values that are left to one run of a template.

    Every operation of a template takes time in proportion to its operands and its result. So two
    sizes bound it: a result has at most `most` characters, and all results have at most `left`. The
    clock is read between operations. Both sizes grow with the variables `given`, which a template
    may copy.

    `answers` has the begin and the end, in the text, of each block that the template marks as an
    answer of the model.
    """

    def __init__(self, given: Mapping[str, TemplateValue]) -> None:
        self.most = sys.maxsize
        size = self.size(dict(given))
        self.most = _LEAST + _TIMES * size
        self.left = _LEAST_ALL + _TIMES_ALL * size
        self._end = time.monotonic() + SECONDS
        self._depth = 0
        self.answers: list[tuple[int, int]] = []
        self._begun: list[int] = []
        self._written = 0

    def write(self, part: str) -> None:
        """Count a part of the whole text, as long as it may be."""
        self._written += len(part)
        self.spend(len(part))
        self.require_room(self._written)

    def mark_answer(self, begins: bool) -> None:
        """Note that an answer begins, or ends, where the text has come to."""
        if begins:
            self._begun.append(self._written)
            self.require_room(_ELEMENT * len(self._begun))
        else:
            self.answers.append((self._begun.pop(), self._written))
        self.spend(_ELEMENT)

    def spend(self, size: int = 1) -> None:
        """Take a step that makes a value of this size."""
        self.left -= size
        if self.left < 0:
            raise ExceededError("it makes too many and too long values")
        if time.monotonic() > self._end:
            raise ExceededError(f"it takes longer than {SECONDS:g} s")

    def require_room(self, size: int) -> None:
        """Refuse a value that would be too long, before it is made."""
        if size > self.most:
            raise ExceededError(f"it makes a value of more than {self.most} characters")

    def size(self, value: object, depth: int = 0) -> int:
        """Return the size of a value as it would be written: what it has twice counts twice."""
        if isinstance(value, str | bytes):
            size = len(value)
        elif isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                raise ExceededError(f"it has an integer of more than {MOST_BITS} bits")
            return _ELEMENT
        elif isinstance(value, _CONTAINERS):
            if depth == MOST_DEPTH:
                raise ExceededError(f"it has values nested deeper than {MOST_DEPTH}")
            size = _ELEMENT * len(value)
            pairs = chain(value, value.values()) if isinstance(value, dict) else value
            for part in pairs:
                size += self.size(part, depth + 1)
                if size > self.most:
                    break
        else:
            return 1
        self.require_room(size)
        return size

    def made(self, value: object) -> TemplateValue:
        """Pass on the result of an operation, counted; an iterator is counted as it is read."""
        if isinstance(value, Iterator):
            return self.counted(value)
        self.size(value)
        if isinstance(value, str | bytes):
            self.spend(len(value))
        else:  # its parts were counted when they were made
            self.spend(_ELEMENT * len(value) if isinstance(value, _CONTAINERS) else 1)
        return value

    def counted(self, values: Iterable[object]) -> Iterator[TemplateValue]:
        """Pass on items, a step each."""
        for value in values:
            self.spend(_ELEMENT)
            yield value

    def listed(self, values: Iterable[object]) -> list[TemplateValue]:
        """Make a list of an iterable, as long as lists may be."""
        found: list[object] = []
        for value in self.counted(values):
            found.append(value)
            self.require_room(_ELEMENT * len(found))
        return found

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Count a call within a call."""
        if self._depth == MOST_DEPTH:
            raise ExceededError(f"its macros call each other deeper than {MOST_DEPTH}")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def require_operation(self, operator: str, left: object, right: object) -> None:
        """Refuse an operator whose result would be too long."""
        if operator == "%" and isinstance(left, str):
            self.require_percent(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = self._bits(left), self._bits(right)
            grown = sum(bits) if operator == "*" else 0
            if operator == "**" and right > 0 and abs(left) > 1:
                grown = (bits[0] - 1) * right
            if grown > 2 * MOST_BITS:
                raise ExceededError(f"it makes an integer of more than {MOST_BITS} bits")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int):
                    self.require_room(self.size(items) * max(times, 0))

    def _bits(self, number: int) -> int:
        self.size(number)
        return number.bit_length()

    def require_percent(self, text: str, given: object) -> None:
        """Refuse ``text % given`` if its result would be too long."""
        if re.search(r"%\([^()]*\(", text):
            raise ExceededError("it formats by a key with a parenthesis")
        for conversion in _CONVERSION.finditer(text):
            if "*" in conversion[1]:
                raise ExceededError("it formats to a width that is a variable")
            self.require_width(conversion[1])
        self._require_formatted(text, text.count("%"), given, isinstance(given, Mapping))

    def require_format(self, text: str, given: object) -> None:
        """Refuse ``text.format(...)`` if its result would be too long, but for its widths."""
        self._require_formatted(text, text.count("{"), given, True)

    def _require_formatted(self, text: str, fields: int, given: object, again: bool) -> None:
        self.require_room(len(text) + fields * _MOST_WIDTH)
        self.require_room(len(text) + self.size(given) * (fields if again else 1))

    def require_width(self, specification: str) -> None:
        """Refuse a width or a precision of a format that no text needs."""
        if re.search(r"[0-9]{4}", specification):
            raise ExceededError(f"it formats to a width of more than {_MOST_WIDTH}")


_CURRENT: ContextVar[TemplateBudget] = ContextVar("budget")


def current() -> TemplateBudget:
    """Return the budget of the template that runs."""
    return _CURRENT.get()


@contextmanager
def budget(given: Mapping[str, TemplateValue]) -> Iterator[TemplateBudget]:
    """Give what runs within the block a budget, in this thread alone."""
    token = _CURRENT.set(found := TemplateBudget(given))
    try:
        yield found
    finally:
        _CURRENT.reset(token)
