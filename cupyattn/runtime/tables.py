"""Tables of configurations: lookup, options as macros, and pairs for the ahead-of-time list.

A table has architectures as keys: ``{75: {head dim: configuration, ...}, 80: {...}}``. A GPU uses
the configurations of the newest architecture in the table that is not newer than its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from cupyattn.runtime.spec import Gates

MAX_HEAD_DIM = 512
FLOAT_BYTES = 4

_Row = TypeVar("_Row")
_Key = TypeVar("_Key")
ByArch = Mapping[int, Mapping[int, _Row]]
"""Configurations by architecture and by their largest head dim."""


def rows_for(table: Mapping[int, _Row], arch: int) -> _Row:
    """Return a table's configurations for an architecture.

    Examples
    --------
    >>> rows_for({75: "Turing's", 80: "Ampere's"}, 90)
    "Ampere's"
    """
    return table[max(number for number in table if number <= arch)]


def limit_of(rows: Mapping[int, object], head_dim: int, head_dim_v: int) -> int:
    """Return the key of a configuration: the first that is not below either head dim."""
    largest = max(head_dim, head_dim_v)
    return next(limit for limit in rows if largest <= limit)


def row_of(table: ByArch[_Row], arch: int, head_dim: int, head_dim_v: int) -> _Row:
    """Return the first configuration for an architecture that supports both head dims.

    Examples
    --------
    >>> row_of({75: {64: "small", 256: "large"}}, 75, 40, 65)
    'large'
    """
    rows = rows_for(table, arch)
    return rows[limit_of(rows, head_dim, head_dim_v)]


def with_gates(rows: Mapping[_Key, Any], gates: Mapping[_Key, Gates]) -> dict[_Key, Any]:
    """Return the configurations with the gates of their keys; default gates for other keys."""
    return {limit: replace(row, gates=gates.get(limit, Gates())) for limit, row in rows.items()}


def with_mma_k(rows: Mapping[int, Any]) -> ByArch[Any]:
    """Return Turing's configurations, and for sm_80 or later the same with mma.m16n8k16."""
    return {75: rows, 80: {limit: replace(row, mma_k=16) for limit, row in rows.items()}}


def with_l2_ahead(rows: Mapping[int, object], tiles: Mapping[int, int]) -> ByArch[Any]:
    """Add to `with_mma_k` the number of tiles that sm_80 or later prefetches into L2, by key."""
    table = with_mma_k(rows)
    ahead = {limit: replace(table[80][limit], l2_ahead=count) for limit, count in tiles.items()}
    return {**table, 80: {**table[80], **ahead}}


def round_up(count: int, unit: int) -> int:
    """Return the first multiple of `unit` that is not below `count`."""
    return -(-count // unit) * unit


def cpp_bool(value: bool) -> str:
    """Return a bool as a C++ literal."""
    return "true" if value else "false"


def option_macros(options: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the options of a named tuple, all or those named, as macros."""
    given = options._asdict()
    return {name.upper(): _macro(given[name]) for name in (given if names is None else names)}


def _macro(value: object) -> int | str:
    """Return a dtype's name or a number as it is, of all else whether it is there."""
    return value if isinstance(value, str) or type(value) is int else cpp_bool(bool(value))


def pairs(*axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield few combinations that contain every pair of values of every two axes.

    The choice is greedy: the next combination is the first with the most new pairs.

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
    """Return the combinations for axes of these sizes, as indices."""
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
