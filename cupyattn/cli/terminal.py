"""Output of commands: text folded to the terminal's width, or one JSON object.

Paragraphs, facts and tables are folded. A word that is wider than the terminal, as a path may be,
gets a separate line.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from cupyattn.runtime.annotations import Json
from cupyattn.runtime.progress import has_rich

Cell = str | int

_INDENT = 2
_GAP = 2  # between columns
_LEAST = 16  # of a first column next to others


def terminal_width() -> int:
    """Return the columns to print in: COLUMNS, otherwise the terminal's, otherwise 80."""
    return shutil.get_terminal_size().columns


def paragraphs(text: str, width: int) -> list[str]:
    """Fold each line of a text at spaces; continued lines keep the indentation.

    Examples
    --------
    >>> paragraphs("  Counts are exact; time is not known.", 24)
    ['  Counts are exact; time', '  is not known.']
    """
    return [part for line in text.split("\n") for part in _folded(line, width)]


def folded_command(text: str, width: int) -> list[str]:
    r"""Fold a command of the shell between its words; continued lines end in a backslash.

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


class TableLayout(NamedTuple):
    """The lines of a table's heading and of its rows, and the columns that were left out."""

    heading: list[str]
    rows: list[str]
    left_out: list[str]


def folded_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    names: int = 1,
    spare: Sequence[str] = (),
) -> TableLayout:
    r"""Lay out a table whose first `names` columns name the rows; integers are to the right.

    If a row is too wide for one line, headings are folded. If it is still too wide, `spare` columns
    are left out one after the other, or the first names are written once above the rows that share
    them: whichever takes the fewest lines. If nothing fits, long names get a separate line; with
    less than `_LEAST` characters for names all do, and the other columns may take several lines.

    Examples
    --------
    >>> table = folded_table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 24)
    >>> print(*table.heading, *table.rows, sep="\n")
      row         bytes  time
      D 64, MASK      5  2 ms
    >>> table = folded_table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 20)
    >>> print(*table.heading, *table.rows, sep="\n")
      row
        bytes  time
      D 64, MASK
            5  2 ms
    >>> rows = [("softmax", 768, "cupyattn", "5 us"), ("softmax", 768, "torch", "6 us")]
    >>> table = folded_table(("operation", "width", "ran", "p50"), rows, 24, names=3)
    >>> print(*table.heading, *table.rows, sep="\n")
      operation  width
        ran       p50
      softmax      768
        cupyattn  5 us
        torch     6 us
    """
    every = range(len(columns))
    grids = [_Grid(columns, rows, folds) for folds in (False, True)]
    fitting: dict[tuple[int, int], tuple[_Grid, list[list[int]]]] = {}
    for left in range(len(spare) + 1):
        kept = [at for at in every if columns[at] not in spare[:left]]
        for above in range(names):
            lines = [kept[:above], kept[above:]] if above else [kept]
            for grid in grids:
                if all(grid.width(line, below) <= width for below, line in enumerate(lines)):
                    fitting.setdefault((grid.groups(above), left), (grid, lines))
                    break
    if fitting:
        fewest = min(fitting)
        grid, lines = fitting[fewest]
        found = grid.rows(lines, width, grouped=len(lines) > 1)
        return TableLayout(grid.heading(lines, width), found, list(spare[: fewest[1]]))
    grid = grids[1]
    kept = [at for at in every if columns[at] not in spare]
    if names == 1 and grid.narrow_first(width - grid.width(kept[1:], below=0) - _GAP):
        return TableLayout(grid.heading([kept], width), grid.rows([kept], width), list(spare))
    below = [every[:names], *grid.filled(every[names:], width)]
    return TableLayout(grid.heading(below, width), grid.rows(below, width), [])


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
        """Return the width of a line of columns: the first of a row, or one below it."""
        gaps = _GAP * (len(columns) - 1)
        return _indent(below) + sum(self._widths[at] for at in columns) + gaps

    def groups(self, names: int) -> int:
        """Return how many lines the first `names` columns take above the rows that share them."""
        shared = [row[:names] for row in self._rows]
        return sum(1 for _ in groupby(shared)) if names else 0

    def narrow_first(self, width: int) -> bool:
        """Narrow the first column, unless it would be too narrow; wider cells get own lines."""
        if width < _LEAST:
            return False
        self._widths[0] = width
        return True

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
        """Return the lines of the heading; folded headings end in the same line."""
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
            if len(lines) == 1 and len(row[0]) > self._widths[0]:
                written += _folded(" " * _INDENT + row[0], width)
                row = ["", *row[1:]]
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
        """Print a heading, after a blank line unless it is the first."""
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
        """Print a line in green if `good`, otherwise in red."""
        self._print(paragraphs(text, self._width), "green" if good else "bold red")

    def facts(self, facts: Mapping[str, object]) -> None:
        """Print names and values, one pair a line."""
        self._print(folded_facts(facts, self._width))

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        names: int = 1,
        spare: Sequence[str] = (),
    ) -> list[str]:
        """Print a table; return the `spare` columns that were left out (see `folded_table`)."""
        heading, lines, left_out = folded_table(columns, rows, self._width, names, spare)
        self._print(heading, "dim")
        self._print(lines)
        return left_out

    def left_out(self, columns: Iterable[str]) -> None:
        """Print which columns tables left out, if any."""
        names = ", ".join(dict.fromkeys(columns))
        if names:
            self.text(f"  Left out at {self._width} columns: {names} (set COLUMNS to see them).")

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            print(line)


class RichTerminal(Terminal):
    """A `Terminal` that prints through rich, with styles for headings and verdicts.

    If NO_COLOR is set, there are no styles: rich itself would drop colours but not bold.
    """

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        # Texts are data: a bracket in them is a bracket, not markup.
        self._console = Console(markup=False, highlight=False, emoji=False)

    def _print(self, lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            style = "" if os.environ.get("NO_COLOR") else style
            self._console.print(line, style=style, soft_wrap=True)  # it is folded already


def emit(result: Result, show: Callable[[Result, Terminal], None], *, as_json: bool) -> None:
    """Print a command's result, as JSON or by its `show`."""
    if as_json:
        print(json.dumps(result, indent=2, allow_nan=False))
    else:
        show(result, RichTerminal() if has_rich() and sys.stdout.isatty() else Terminal())


def fail(command: str, failure: Exception, *, as_json: bool) -> None:
    """Report why a command failed, on stderr and, with --json, as an object on stdout."""
    reason = str(failure)
    if isinstance(failure, OSError) and failure.strerror and failure.filename:
        reason = f"{failure.strerror}: {failure.filename}"
    if as_json:
        print(json.dumps({"command": command, "ok": False, "error": reason}, indent=2))
    print(f"{command}: {reason}", file=sys.stderr)
