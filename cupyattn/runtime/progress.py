"""Progress of long tasks on stderr, so that stdout has only the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from cupyattn.runtime.fork import no_fork

SECONDS_BETWEEN_LINES = 5.0
"""For a file or a pipe: often enough to show progress, seldom enough for a log."""


class Advance(Protocol):
    """A function that reports a finished step, optionally with a text about it."""

    def __call__(self, text: str = "", /) -> None:
        """Report one finished step; `text` is shown until the next."""
        ...


def has_rich() -> bool:
    """Tell whether rich is installed."""
    return find_spec("rich") is not None


@contextmanager
def progress(doing: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show how many of `total` steps are done: a bar on a terminal, otherwise occasional lines.

    `done` steps are done at the start. A process without stderr (pythonw, a closed descriptor)
    shows nothing.

    Yields
    ------
    callable
        A function to call after each step.
    """
    if sys.stderr is None:
        yield _nothing
    elif sys.stderr.isatty():
        with (_bar if has_rich() else _counter)(doing, total, done) as step:
            yield step
    else:
        yield _lines(doing, total, done)


def _nothing(text: str = "", /) -> None:
    pass


@contextmanager
def _bar(doing: str, total: int, done: int) -> Iterator[Advance]:
    with no_fork():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (
        "{task.description}",
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "{task.fields[text]}",
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total, completed=done, text="")

        def step(text: str = "", /) -> None:
            bar.update(task, advance=1, text=text)

        yield step


@contextmanager
def _counter(doing: str, total: int, done: int) -> Iterator[Advance]:
    def step(text: str = "", /) -> None:
        nonlocal done
        done += 1
        line = f"{doing} {done}/{total} {text}".rstrip()
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        print(file=sys.stderr)


def _lines(doing: str, total: int, done: int) -> Advance:
    last = time.monotonic()

    def step(text: str = "", /) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{doing} {done}/{total} {text}".rstrip(), file=sys.stderr, flush=True)

    return step
