"""HTML of objects for notebooks: facts, tables, bars and grids of cells.

Styles are inline, and text has the colours of the page, so that dark and light themes both work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

BLUE, VIOLET, ORANGE, GREEN = "#3b82f6", "#a855f7", "#e08a1e", "#22a06b"
GREY = "rgba(127,127,127,.3)"
_LINE = "rgba(127,127,127,.4)"
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
_LONGEST = 300
"""Characters of a text; names and reasons of the library are shorter."""
_WIDTH = 240  # pixels of a grid or a bar
_LARGEST_CELL = 14


class Share(NamedTuple):
    """A part of a bar or a kind of cells in a grid: its name, its size and its colour."""

    name: str
    size: int
    colour: str


def escaped(value: object) -> str:
    """Return a text for HTML, cut where it is too long.

    Examples
    --------
    >>> escaped("k < 3 & q")
    'k &lt; 3 &amp; q'
    """
    text = str(value)
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...").translate(_ESCAPES)


def section(title: object, *parts: str) -> str:
    """Return an object's HTML: its title, then its parts."""
    head = f'<div style="font-weight:600;margin-bottom:4px">{escaped(title)}</div>'
    return (
        '<div style="font:13px/1.45 system-ui,sans-serif;max-width:52em;text-align:left">'
        f"{head}{''.join(parts)}</div>"
    )


def paragraph(text: object) -> str:
    """Return a line of text."""
    return f'<div style="margin:2px 0">{escaped(text)}</div>'


def facts(pairs: Mapping[str, object]) -> str:
    """Return names and values, one pair a line, without those whose value is None."""
    return _table(
        f"<tr>{_cell(name, ';opacity:.7')}{_cell(str(value))}</tr>"
        for name, value in pairs.items()
        if value is not None
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; integers are to the right."""
    head = "".join(
        f'<th style="{_CELL};text-align:left;border-bottom:1px solid {_LINE}">{escaped(name)}</th>'
        for name in columns
    )
    return _table([f"<tr>{head}</tr>", *(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)])


_CELL = "padding:1px 12px 1px 0;vertical-align:top"
_SHORT = 30  # characters that stay in one line


def _table(rows: Iterable[str]) -> str:
    style = "border-collapse:collapse;border:0;margin:4px 0;font-size:13px"
    return f'<table style="{style}">{"".join(rows)}</table>'


def _cell(value: object, style: str = "") -> str:
    text, side = ("", "left") if value is None else (str(value), "left")
    if isinstance(value, int) and not isinstance(value, bool):
        text, side = f"{value:,}", "right"
    kept = ";white-space:nowrap" if len(text) <= _SHORT else ""
    return f'<td style="{_CELL};text-align:{side}{kept}{style}">{escaped(text)}</td>'


def bar(shares: Sequence[Share]) -> str:
    """Return a bar of parts of a whole, and its legend; parts of size 0 are only in the legend."""
    whole = sum(share.size for share in shares) or 1
    drawn, start = [], 0.0
    for share in shares:
        width = 2 * _WIDTH * share.size / whole
        if share.size:
            drawn.append(
                f'<rect x="{start:.1f}" width="{width:.1f}" height="14" fill="{share.colour}"/>'
            )
        start += width
    return _svg(2 * _WIDTH, 14, 2 * _WIDTH, 14, "".join(drawn)) + legend(shares)


def legend(shares: Iterable[Share]) -> str:
    """Return the names, sizes and colours of parts."""
    names = "".join(
        f'<span style="display:inline-block;margin-right:14px"><span style="display:inline-block;'
        f"width:10px;height:10px;border:1px solid {_LINE};background:{share.colour};"
        f'margin-right:5px"></span>{share.size:,} {escaped(share.name)}</span>'
        for share in shares
    )
    return f"<div>{names}</div>"


def grid(kinds: Sequence[Sequence[int]], colours: Mapping[int, str]) -> str:
    """Return a picture of rows of cells; kinds without a colour are left empty."""
    rows, columns = len(kinds), max(map(len, kinds), default=0)
    side = min(_LARGEST_CELL, _WIDTH / max(rows, columns, 1))
    paths = "".join(
        f'<path stroke="{colour}" d="{_runs(kinds, kind)}"/>' for kind, colour in colours.items()
    )
    drawn = f'<g transform="translate(0,.5)" shape-rendering="crispEdges">{paths}</g>'
    return _svg(columns, rows, columns * side, rows * side, drawn)


def _runs(kinds: Sequence[Sequence[int]], chosen: int) -> str:
    """Return a line for each run of cells of one kind in a row."""
    lines = []
    for y, row in enumerate(kinds):
        x = 0
        for kind, run in groupby(row):
            length = sum(1 for _ in run)
            if kind == chosen:
                lines.append(f"M{x} {y}h{length}")
            x += length
    return "".join(lines)


def _svg(columns: int, rows: int, width: float, height: float, drawn: str) -> str:
    return (
        f'<svg width="{width:.0f}" height="{max(height, 1):.0f}" viewBox="0 0 {columns} {rows}" '
        'preserveAspectRatio="none" style="display:inline-block;vertical-align:top;'
        f'outline:1px solid {_LINE};margin:4px 14px 4px 1px">{drawn}</svg>'
    )


def side_by_side(parts: Iterable[tuple[str, str]]) -> str:
    """Return parts with their captions in one line, as far as there is room."""
    shown = "".join(
        f'<div style="display:inline-block;vertical-align:top">{part}'
        f'<div style="opacity:.7">{escaped(caption)}</div></div>'
        for caption, part in parts
    )
    return f"<div>{shown}</div>"
