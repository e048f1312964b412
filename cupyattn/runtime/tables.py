"""What the tables have in common: choosing a row, sizes, options as macros, the catalogue's pairs.

A table is keyed by architecture first: ``{75: {head dim: row, ...}, 80: {...}}``. A GPU takes the
rows of the newest architecture in it that is not newer than its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from cupyattn.runtime.spec import Gates

MAX_HEAD_DIM = 256
FLOAT_BYTES = 4

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")
ByArch = Mapping[int, Mapping[int, _Row]]
"""Rows by their largest head dim, by architecture."""


def rows_for(table: Mapping[int, _Row], arch: int) -> _Row:
    """Return what a table has for an architecture.

    Examples
    --------
    >>> rows_for({75: "Turing's", 80: "Ampere's"}, 90)
    "Ampere's"
    """
    return table[max(number for number in table if number <= arch)]


def limit_of(rows: Mapping[int, Any], head_dim: int, head_dim_v: int) -> int:
    """Return the key of a row: the first that is not below either head dim."""
    largest = max(head_dim, head_dim_v)
    return next(limit for limit in rows if largest <= limit)


def row_of(table: ByArch[_Row], arch: int, head_dim: int, head_dim_v: int) -> _Row:
    """Return the first row for an architecture whose head dim is not below either of these.

    Examples
    --------
    >>> row_of({75: {64: "small", 256: "large"}}, 75, 40, 65)
    'large'
    """
    rows = rows_for(table, arch)
    return rows[limit_of(rows, head_dim, head_dim_v)]


def with_gates(rows: Mapping[_Key, Any], gates: Mapping[_Key, Gates]) -> dict[_Key, Any]:
    """Return the rows, each with the gates of its limit; the usual ones where there are none."""
    return {limit: replace(row, gates=gates.get(limit, Gates())) for limit, row in rows.items()}


def with_mma_k(rows: Mapping[int, Any]) -> ByArch[Any]:
    """Return Turing's rows, and for sm_80 on the same with mma.m16n8k16 in place of m16n8k8."""
    return {75: rows, 80: {limit: replace(row, mma_k=16) for limit, row in rows.items()}}


def with_l2_ahead(rows: Mapping[int, Any], tiles: Mapping[int, int]) -> ByArch[Any]:
    """Return the same, and from sm_80 on these rows bring tiles to L2 that many ahead."""
    table = with_mma_k(rows)
    ahead = {limit: replace(table[80][limit], l2_ahead=count) for limit, count in tiles.items()}
    return {**table, 80: {**table[80], **ahead}}


def round_up(count: int, unit: int) -> int:
    """Return the first multiple of `unit` that is not below `count`."""
    return -(-count // unit) * unit


def cpp_bool(value: bool) -> str:
    """Return the C++ literal."""
    return "true" if value else "false"


def option_macros(options: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return options (a named tuple), all or those named, as the macros of their names."""
    given = options._asdict()
    return {name.upper(): _macro(given[name]) for name in (given if names is None else names)}


def _macro(value: object) -> int | str:
    """Return a dtype's name or a number as it is, of all else whether it is there."""
    return value if isinstance(value, str) or type(value) is int else cpp_bool(bool(value))


def pairs(*axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations in which every two values of two axes meet, and far fewer than all.

    Greedy: each next combination is the first that meets the most pairs not met so far.

    Examples
    --------
    >>> len(list(pairs("abc", "xyz", (1, 2)))), len(list(pairs("abc", (1, 2))))
    (9, 6)
    """
    values = [list(axis) for axis in axes]
    for row in _rows_of_pairs(tuple(map(len, values))):
        yield tuple(of_axis[i] for of_axis, i in zip(values, row, strict=True))


@cache
def _rows_of_pairs(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the combinations as positions in axes of these sizes."""
    pairs_of = {
        row: frozenset(itertools.combinations(enumerate(row), 2))
        for row in itertools.product(*map(range, sizes))
    }
    missing = set().union(*pairs_of.values())
    rows = []
    while missing:
        best = max(pairs_of, key=lambda row: len(missing & pairs_of[row]))
        rows.append(best)
        missing -= pairs_of[best]
    return tuple(rows)
