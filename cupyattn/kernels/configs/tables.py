"""What the tables have in common: choosing a row, sizes, options as macros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from cupyattn.kernels.spec import KernelSpec
from cupyattn.kernels.structs import ATTENTION_PARAMS, BACKWARD_PARAMS

MAX_HEAD_DIM = 256
FLOAT_BYTES = 4

BACKWARD_BYTES = {
    "PARAMS_BYTES": ATTENTION_PARAMS.itemsize,
    "BACKWARD_PARAMS_BYTES": BACKWARD_PARAMS.itemsize,
}
"""The sizes of the structs, which sources assert: macros of every kernel of the backward."""

_Row = TypeVar("_Row")


def limit_of(table: Mapping[int, Any], head_dim: int, head_dim_v: int) -> int:
    """Return the key of a table's row: the first that is not below either head dim."""
    largest = max(head_dim, head_dim_v)
    return next(limit for limit in table if largest <= limit)


def row_of(table: Mapping[int, _Row], head_dim: int, head_dim_v: int) -> _Row:
    """Return the first row whose head dim is not below either of these.

    Examples
    --------
    >>> row_of({64: "small", 256: "large"}, 40, 65)
    'large'
    """
    return table[limit_of(table, head_dim, head_dim_v)]


def round_up(count: int, unit: int) -> int:
    """Return the first multiple of `unit` that is not below `count`."""
    return -(-count // unit) * unit


def cpp_bool(value: bool) -> str:
    """Return the C++ literal."""
    return "true" if value else "false"


def option_macros(spec: KernelSpec, options: Any) -> dict[str, int | str]:
    """Return those of the options (a named tuple) that are macros of a kernel, by their names."""
    return {
        name.upper(): cpp_bool(value) if isinstance(value, bool) else value
        for name, value in options._asdict().items()
        if name.upper() in spec.macros
    }
