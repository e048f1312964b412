"""What commands print with: rich on a terminal, plain text elsewhere, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

Cell = str | int
Result = dict[str, Any]


class Terminal:
    """Plain text on stdout, for files, pipes and where rich is not installed."""

    _gap = ""  # a blank line before every heading but the first

    def title(self, text: str) -> None:
        """Print the heading of what follows."""
        print(f"{self._gap}{text}")
        self._gap = "\n"

    def text(self, text: str) -> None:
        """Print a line."""
        print(text)

    def verdict(self, good: bool, text: str) -> None:
        """Print a line that says whether all is well."""
        print(text)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values, one pair a line."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            print(f"  {name:<{width}}  {value}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table; columns of integers are aligned to the right."""
        texts = [columns, *([str(cell) for cell in row] for row in rows)]
        widths = [max(len(text) for text in column) for column in zip(*texts, strict=True)]
        for text in texts:
            cells = (
                f"{cell:>{width}}" if numeric else f"{cell:<{width}}"
                for cell, width, numeric in zip(text, widths, _numeric(columns, rows), strict=True)
            )
            print(("  " + "  ".join(cells)).rstrip())


class RichTerminal(Terminal):
    """The same on a terminal, with rich: headings and verdicts in colour, tables ruled."""

    def __init__(self) -> None:
        from rich.console import Console

        # Texts are data: a bracket in them is a bracket, not markup.
        self._console = Console(markup=False, highlight=False, emoji=False)

    def title(self, text: str) -> None:
        """Print the heading of what follows."""
        self._console.print(f"{self._gap}{text}", style="bold")
        self._gap = "\n"

    def text(self, text: str) -> None:
        """Print a line."""
        self._console.print(text)

    def verdict(self, good: bool, text: str) -> None:
        """Print a line that says whether all is well."""
        self._console.print(text, style="green" if good else "bold red")

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values, one pair a line."""
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        for name, value in facts.items():
            grid.add_row(f"  {name}", str(value))
        self._console.print(grid)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table; columns of integers are aligned to the right, the first may wrap."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, show_edge=False)
        for index, numeric in enumerate(_numeric(columns, rows)):
            table.add_column(
                columns[index], justify="right" if numeric else "left", no_wrap=index > 0
            )
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(table)


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Tell which columns hold integers alone."""
    return [all(isinstance(row[index], int) for row in rows) for index in range(len(columns))]


def emit(result: Result, show: Callable[[Result, Terminal], None], *, as_json: bool) -> None:
    """Print a command's result, as JSON or by its `show`."""
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result, RichTerminal() if _has_rich() and sys.stdout.isatty() else Terminal())


def fail(command: str, failure: Exception, *, as_json: bool) -> None:
    """Say why a command could not do its work."""
    if as_json:
        print(json.dumps({"command": command, "ok": False, "error": str(failure)}, indent=2))
    print(f"{command}: {failure}", file=sys.stderr)


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how far a long piece of work is, on stderr; silent where that is no terminal.

    Yields
    ------
    callable
        To be called after each of the `total` steps.
    """
    if not sys.stderr.isatty():
        yield lambda: None
    elif _has_rich():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda: bar.advance(task)
    else:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            print(f"\r{doing} {done}/{total}", end="", file=sys.stderr, flush=True)

        try:
            yield step
        finally:
            print(file=sys.stderr)


def _has_rich() -> bool:
    return find_spec("rich") is not None
