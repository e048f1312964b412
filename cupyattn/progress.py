"""How far a long piece of work is, on stderr, which leaves stdout to the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

SECONDS_BETWEEN_LINES = 5.0
"""In a file or a pipe: often enough to be seen alive, and seldom enough for a log."""


def has_rich() -> bool:
    """Tell whether rich is installed."""
    return find_spec("rich") is not None


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how many of `total` steps are done: a bar on a terminal, now and then a line elsewhere.

    Yields
    ------
    callable
        To be called after each step.
    """
    if sys.stderr.isatty():
        with (_bar if has_rich() else _counter)(doing, total) as step:
            yield step
    else:
        yield _lines(doing, total)


@contextmanager
def _bar(doing: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _counter(doing: str, total: int) -> Iterator[Callable[[], None]]:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        print(f"\r{doing} {done}/{total}", end="", file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        print(file=sys.stderr)


def _lines(doing: str, total: int) -> Callable[[], None]:
    done, told = 0, time.monotonic()

    def step() -> None:
        nonlocal done, told
        done += 1
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            print(f"{doing} {done}/{total}", file=sys.stderr, flush=True)

    return step
