"""Text folded to the width of a terminal: paragraphs, facts and tables. Nothing is ever cut.

A word that is wider than the terminal, as a path may be, keeps its line to itself.
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

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


def command(text: str, width: int) -> list[str]:
    r"""Fold a command of the shell between its words; what is folded ends in a backslash.

    Examples
    --------
    >>> print(*command("python -m cupyattn finetune 'my model' data.jsonl", 32), sep="\n")
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


def facts(pairs: Mapping[str, Any], width: int) -> list[str]:
    """Write names and values, one pair a line; a value is folded beside its name.

    Examples
    --------
    >>> facts({"CuPy": "14.0", "cache": "of this user alone"}, 21)
    ['  CuPy   14.0', '  cache  of this user', '         alone']
    """
    names = max(map(len, pairs), default=0)
    lines = []
    for name, value in pairs.items():
        head = f"{'':{_INDENT}}{name:<{names}}{'':{_GAP}}"
        first, *others = _folded(str(value), width - len(head))
        lines += [head + first, *(" " * len(head) + other for other in others)]
    return lines


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], width: int
) -> tuple[list[str], list[str]]:
    r"""Lay out a table whose first column names the rows; integers are aligned to the right.

    Where a row is too wide for one line, its name has a line of its own and the other columns
    stand below it, on as many lines as they need.

    Returns
    -------
    tuple of two lists of str
        The lines of the heading, and those of the rows.

    Examples
    --------
    >>> heading, rows = table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 24)
    >>> print(*heading, *rows, sep="\n")
      row         bytes  time
      D 64, MASK      5  2 ms
    >>> heading, rows = table(("row", "bytes", "time"), [("D 64, MASK", 5, "2 ms")], 20)
    >>> print(*heading, *rows, sep="\n")
      row
        bytes  time
      D 64, MASK
            5  2 ms
    """
    texts = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [all(isinstance(row[at], int) for row in rows) for at in range(len(columns))]
    lines = _columns_by_line(widths, width)

    def written(cells: Sequence[str]) -> list[str]:
        aligned = [
            f"{cell:>{size}}" if right else f"{cell:<{size}}"
            for cell, size, right in zip(cells, widths, numeric, strict=True)
        ]
        if len(lines) == 1:
            return [" " * _INDENT + (" " * _GAP).join(aligned).rstrip()]
        below = ((" " * _GAP).join(aligned[at] for at in line).rstrip() for line in lines[1:])
        name = _folded(" " * _INDENT + cells[0], width)
        return name + [" " * 2 * _INDENT + line for line in below if line]

    return written(columns), [line for row in texts[1:] for line in written(row)]


def _columns_by_line(widths: Sequence[int], width: int) -> list[list[int]]:
    """Return the columns of each line: all of them, or the first alone and the others as fits."""
    if _INDENT + sum(widths) + _GAP * (len(widths) - 1) <= width:
        return [list(range(len(widths)))]
    lines: list[list[int]] = [[0]]
    room = 0
    for at, size in enumerate(widths[1:], start=1):
        if len(lines) == 1 or size + _GAP > room:
            lines.append([])
            room = width - 2 * _INDENT + _GAP
        lines[-1].append(at)
        room -= size + _GAP
    return lines


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
