"""Progress of long tasks on stderr, so that stdout has only the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
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


class _Steps:
    """The finished steps of a task, and the time that is left."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self.done = self._start = done
        self._since = time.monotonic()
        self.now = self._since

    def add(self) -> None:
        """Count a finished step."""
        self.done += 1
        self.now = time.monotonic()
        if self.done == self._start + 1:
            self._first = self.now

    @property
    def left(self) -> str:
        """The estimated time left, "" where it is not known or under a second.

        The first step is left out as soon as there are two: it may compile kernels.
        """
        steps = self.done - self._start
        if not steps > 0 or self.done >= self._total:
            return ""
        seconds = self.now - self._since if steps == 1 else (self.now - self._first) / (steps - 1)
        whole = round(seconds * (self._total - self.done))
        return f"ETA {whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}" if whole else ""

    def line(self, doing: str, text: str) -> str:
        """Return a line about the task."""
        return " ".join(filter(None, (f"{doing} {self.done}/{self._total}", self.left, text)))


@contextmanager
def progress(doing: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Show how many of `total` steps are done: a bar on a terminal, otherwise occasional lines.

    `done` steps are done at the start. The time that is left is estimated from the steps since
    then. A process without stderr (pythonw, a closed descriptor) shows nothing.

    Yields
    ------
    callable
        A function to call after each step.
    """
    steps = _Steps(total, done)
    if sys.stderr is None:
        yield _nothing
    elif sys.stderr.isatty():
        with _bar(doing, total, steps) if has_rich() else _counter(doing, steps) as step:
            yield step
    else:
        yield _lines(doing, steps)


def _nothing(text: str = "", /) -> None:
    pass


@contextmanager
def _bar(doing: str, total: int, steps: _Steps) -> Iterator[Advance]:
    with no_fork():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (
        "{task.description}",
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "{task.fields[left]}",
        "{task.fields[text]}",
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total, completed=steps.done, text="", left="")

        def step(text: str = "", /) -> None:
            steps.add()
            bar.update(task, completed=steps.done, text=text, left=steps.left)

        yield step


@contextmanager
def _counter(doing: str, steps: _Steps) -> Iterator[Advance]:
    longest = 0

    def step(text: str = "", /) -> None:
        nonlocal longest
        steps.add()
        line = steps.line(doing, text)
        print(f"\r{line:<{longest}}", end="", file=sys.stderr, flush=True)
        longest = len(line)

    try:
        yield step
    finally:
        print(file=sys.stderr)


def _lines(doing: str, steps: _Steps) -> Advance:
    last = steps.now

    def step(text: str = "", /) -> None:
        nonlocal last
        steps.add()
        if steps.now - last >= SECONDS_BETWEEN_LINES:
            last = steps.now
            print(steps.line(doing, text), file=sys.stderr, flush=True)

    return step


@contextmanager
def stages(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what a task is doing on stderr: a line that vanishes on a terminal, otherwise lines.

    Yields
    ------
    callable
        A function to call with a text at the beginning of each stage.
    """
    if not shown or sys.stderr is None:
        yield _nothing
        return
    if sys.stderr.isatty() and has_rich():
        with no_fork():
            from rich.console import Console
            from rich.markup import escape

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            with console.status("") as status:
                yield lambda text: status.update(escape(text))
            return
    yield lambda text: print(text, file=sys.stderr, flush=True)
