"""Calls of a generator one at a time, and what the garbage collector ends within one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

Result = TypeVar("Result")


class Calls:
    """Calls one at a time: a call that may come at any time waits for the one under way.

    A stream that nobody reads ends as its iterator is collected: between two calls, or, where it
    stands in a cycle, within a step, a submission or a cancellation, even with the allocator's lock
    held.
    """

    def __init__(self) -> None:
        self._within = Lock()
        self._left: list[Callable[[], None]] = []

    def make(self, call: Callable[..., Result], *given: Any) -> Result:
        """Make a call, and behind it what was left meanwhile."""
        if self._within.locked():  # within another one: the scheduler says whether it may be
            return call(*given)
        try:
            with self._within:
                return call(*given)
        finally:
            self._make_left()

    def leave(self, call: Callable[..., None], *given: Any) -> None:
        """Make a call now, or as soon as the one that is under way has ended."""
        self._left.append(partial(call, *given))
        self._make_left()

    def _make_left(self) -> None:
        while self._left and not self._within.locked():
            with self._within:
                self._left.pop()()
