"""Output of commands: text folded to the terminal's width, or one JSON object.

Paragraphs, facts and tables are folded. Nothing is ever cut: a word that is wider than the
terminal, as a path may be, has a line of its own.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence

from cupyattn.runtime.annotations import Json
from cupyattn.runtime.progress import has_rich

Cell = str | int

_INDENT = 2
_GAP = 2  # between columns


def terminal_width() -> int:
    """Return the columns to print in: COLUMNS, otherwise the terminal's, otherwise 80."""
    return shutil.get_terminal_size().columns


def paragraphs(text: str, width: int) -> list[str]:
    """Fold each line of a text at spaces; what is folded keeps the line's indentation.

    Examples
    --------
    >>> paragraphs("  Counts are exact; time is not known.", 24)
    ['  Counts are exact; time', '  is not known.']
    """
    return [part for line in text.split("\n") for part in _folded(line, width)]


def folded_command(text: str, width: int) -> list[str]:
    r"""Fold a command of the shell between its words; what is folded ends in a backslash.

    Examples
    --------
    >>> print(*folded_command("python -m cupyattn finetune 'my model' data.jsonl", 32), sep="\n")
    python -m cupyattn finetune \
      'my model' data.jsonl
    """
    lines = [""]
    for word in map(shlex.quote, shlex.split(text)):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if len(longer) + len(" \\") <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines[-1] += " \\"
            lines.append(f"{'':{_INDENT}}{word}")
    return lines


def folded_facts(pairs: Mapping[str, object], width: int) -> list[str]:
    """Write names and values, one pair a line; a value is folded next to its name.

    Examples
    --------
    >>> folded_facts({"CuPy": "14.0", "cache": "of this user alone"}, 21)
    ['  CuPy   14.0', '  cache  of this user', '         alone']
    """
    names = max(map(len, pairs), default=0)
    lines = []
    for name, value in pairs.items():
        head = f"{'':{_INDENT}}{name:<{names}}{'':{_GAP}}"
        first, *others = _folded(str(value), width - len(head))
        lines += [head + first, *(" " * len(head) + other for other in others)]
    return lines


def folded_table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, names: int = 1
) -> tuple[list[str], list[str]]:
    r"""Lay out a table whose first `names` columns name the rows; integers are to the right.

    Where a row is too wide for one line, headings are folded. If it is too wide still, names but
    the last stand once above the rows that share them. If that is too wide too, the names have a
    line of their own and the other columns stand below it, on as many lines as they need.

    Returns
    -------
    tuple of two lists of str
        The lines of the heading, and those of the rows.

    Examples
    --------
    >>> heading, rows = folded_table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 24)
    >>> print(*heading, *rows, sep="\n")
      row         bytes  time
      D 64, MASK      5  2 ms
    >>> heading, rows = folded_table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 20)
    >>> print(*heading, *rows, sep="\n")
      row
        bytes  time
      D 64, MASK
            5  2 ms
    >>> rows = [("softmax", 768, "cupyattn", "5 us"), ("softmax", 768, "torch", "6 us")]
    >>> heading, rows = folded_table(("operation", "width", "ran", "p50"), rows, 24, names=3)
    >>> print(*heading, *rows, sep="\n")
      operation  width
        ran       p50
      softmax      768
        cupyattn  5 us
        torch     6 us
    """
    every = range(len(columns))
    alike = [[every[: names - 1], every[names - 1 :]]] if names > 1 else []
    for folds, lines in ((False, [every]), (True, [every]), *((True, each) for each in alike)):
        grid = _Grid(columns, rows, folds)
        if all(grid.width(line, below) <= width for below, line in enumerate(lines)):
            return grid.heading(lines, width), grid.rows(lines, width, grouped=len(lines) > 1)
    below = [every[:names], *grid.filled(every[names:], width)]
    return grid.heading(below, width), grid.rows(below, width)


class _Grid:
    """The cells of a table, and how wide its columns are; headings fold to their cells' width."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], folds: bool) -> None:
        self._rows = [list(map(str, row)) for row in rows]
        self._right = [all(isinstance(row[at], int) for row in rows) for at in range(len(columns))]
        self._headings, self._widths = [], []
        for at, name in enumerate(columns):
            cells = max((len(row[at]) for row in self._rows), default=0)
            least = max(map(len, name.split()), default=0)
            heading = _folded(name, max(cells, least)) if folds else [name]
            self._headings.append(heading)
            self._widths.append(max(cells, *map(len, heading)))

    def width(self, columns: Sequence[int], below: int) -> int:
        """Return that of a line of columns: the first of a row, or one that stands below it."""
        gaps = _GAP * (len(columns) - 1)
        return _indent(below) + sum(self._widths[at] for at in columns) + gaps

    def filled(self, columns: Sequence[int], width: int) -> list[list[int]]:
        """Return the columns of each line below the names: as many as fit."""
        lines: list[list[int]] = []
        for at in columns:
            if lines and self.width([*lines[-1], at], below=1) <= width:
                lines[-1].append(at)
            else:
                lines.append([at])
        return lines

    def heading(self, lines: Sequence[Sequence[int]], width: int) -> list[str]:
        """Return the lines of the heading; what is folded ends in the same line."""
        written: list[str] = []
        for below, columns in enumerate(lines):
            deep = max(len(self._headings[at]) for at in columns)
            padded = [[""] * deep + heading for heading in self._headings]
            for up in range(deep, 0, -1):
                line = self._line(columns, [each[-up] for each in padded], below)
                written += _folded(line, width)
        return written

    def rows(
        self, lines: Sequence[Sequence[int]], width: int, *, grouped: bool = False
    ) -> list[str]:
        """Return the lines of the rows; if they are grouped, a first line that is new alone."""
        written: list[str] = []
        before = None
        for row in self._rows:
            first, *others = (
                self._line(columns, row, below) for below, columns in enumerate(lines)
            )
            kept = others if grouped and first == before else [first, *others]
            written += [part for line in kept if line for part in _folded(line, width)]
            before = first
        return written

    def _line(self, columns: Sequence[int], cells: Sequence[str], below: int) -> str:
        aligned = (
            f"{cells[at]:>{self._widths[at]}}"
            if self._right[at]
            else f"{cells[at]:<{self._widths[at]}}"
            for at in columns
        )
        return (" " * _indent(below) + (" " * _GAP).join(aligned)).rstrip()


def _indent(below: int) -> int:
    return 2 * _INDENT if below else _INDENT


def _folded(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line,
        max(width, len(indent) + 1),
        subsequent_indent=indent,
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


Result = Json


class Terminal:
    """Plain text on stdout, for files, pipes and where rich is not installed."""

    def __init__(self) -> None:
        self._width = terminal_width()
        self._begun = False

    def title(self, text: str) -> None:
        """Print the heading of what follows, behind a blank line unless it is the first."""
        if self._begun:
            self._print([""])
        self._begun = True
        self._print(paragraphs(text, self._width), "bold")

    def text(self, text: str) -> None:
        """Print lines, folded."""
        self._print(paragraphs(text, self._width))

    def command(self, text: str) -> None:
        """Print a command of the shell, folded so that it can be pasted."""
        self._print(folded_command(text, self._width))

    def verbatim(self, text: str) -> None:
        """Print the lines of another program as they are."""
        self._print(text.splitlines())

    def verdict(self, good: bool, text: str) -> None:
        """Print a line that says whether all is well."""
        self._print(paragraphs(text, self._width), "green" if good else "bold red")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Print names and values, one pair a line."""
        self._print(folded_facts(facts, self._width))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]], names: int = 1) -> None:
        """Print a table whose first `names` columns name the rows."""
        heading, lines = folded_table(columns, rows, self._width, names)
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
