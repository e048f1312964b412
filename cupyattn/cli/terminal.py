"""Output of commands: text folded to the terminal's width, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupyattn.cli import layout
from cupyattn.runtime.progress import has_rich

Cell = layout.Cell
Result = dict[str, Any]


class Terminal:
    """Plain text on stdout, for files, pipes and where rich is not installed."""

    def __init__(self) -> None:
        self._width = layout.terminal_width()
        self._begun = False

    def title(self, text: str) -> None:
        """Print the heading of what follows, behind a blank line unless it is the first."""
        if self._begun:
            self._print([""])
        self._begun = True
        self._print(layout.paragraphs(text, self._width), "bold")

    def text(self, text: str) -> None:
        """Print lines, folded."""
        self._print(layout.paragraphs(text, self._width))

    def command(self, text: str) -> None:
        """Print a command of the shell, folded so that it can be pasted."""
        self._print(layout.command(text, self._width))

    def verbatim(self, text: str) -> None:
        """Print the lines of another program as they are."""
        self._print(text.splitlines())

    def verdict(self, good: bool, text: str) -> None:
        """Print a line that says whether all is well."""
        self._print(layout.paragraphs(text, self._width), "green" if good else "bold red")

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Print names and values, one pair a line."""
        self._print(layout.facts(facts, self._width))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], names: int = 1) -> None:
        """Print a table whose first `names` columns name the rows."""
        heading, lines = layout.table(columns, rows, self._width, names)
        self._print(heading, "dim")
        self._print(lines)

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            print(line)


class RichTerminal(Terminal):
    """A `Terminal` that prints through rich, with styles for headings and verdicts."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        # Texts are data: a bracket in them is a bracket, not markup.
        self._console = Console(markup=False, highlight=False, emoji=False)

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            self._console.print(line, style=style, soft_wrap=True)  # it is folded already


def emit(result: Result, show: Callable[[Result, Terminal], None], *, as_json: bool) -> None:
    """Print a command's result, as JSON or by its `show`."""
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result, RichTerminal() if has_rich() and sys.stdout.isatty() else Terminal())


def fail(command: str, failure: Exception, *, as_json: bool) -> None:
    """Say why a command could not do its work."""
    if as_json:
        print(json.dumps({"command": command, "ok": False, "error": str(failure)}, indent=2))
    print(f"{command}: {failure}", file=sys.stderr)
