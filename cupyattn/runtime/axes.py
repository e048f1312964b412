"""Axes that kernels walk: neighbouring ones merged where that changes nothing, and not too many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cupyattn.runtime.errors import error
from cupyattn.runtime.structs import (
    ELEMENTS_AXES,
    OUTER_AXES,
    elements_params,
    new_struct,
    rows_params,
)

Strides = tuple[int, ...]
"""Of the axes of one shape, in items."""


def merge_axes(shape: tuple[int, ...], strides: list[Strides]) -> tuple[Strides, list[Strides]]:
    """Merge neighbouring axes that every array steps through evenly, and drop axes of one.

    Examples
    --------
    >>> merge_axes((2, 3, 4), [(12, 4, 1), (24, 8, 2)])
    ((24,), [(1,), (2,)])
    >>> merge_axes((2, 3), [(3, 1), (1, 2)])
    ((2, 3), [(3, 1), (1, 2)])
    """
    merged_shape: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, extent in enumerate(shape):
        if extent == 1:
            continue
        if merged_shape and all(
            outer[-1] == array[axis] * extent for outer, array in zip(merged, strides, strict=True)
        ):
            merged_shape[-1] *= extent
            for outer, array in zip(merged, strides, strict=True):
                outer[-1] = array[axis]
        else:
            merged_shape.append(extent)
            for outer, array in zip(merged, strides, strict=True):
                outer.append(array[axis])
    return tuple(merged_shape), [tuple(axes) for axes in merged]


def row_params(
    rows: tuple[int, ...],
    length: int,
    arrays: Mapping[str, Strides],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Fill the C struct RowsParams for rows of `length` items, from the strides of each array.

    Raises
    ------
    ValueError
        If there are more axes of rows than kernels walk.
    """
    shape, merged = merge_axes(rows, [*arrays.values()])
    _require_few(len(shape), OUTER_AXES, rows, arrays, shown_as)
    missing = OUTER_AXES - len(shape)
    params = new_struct(rows_params(len(arrays)))
    params["shape"] = shape + (1,) * missing
    params["strides"] = [axes + (0,) * missing for axes in merged]
    params["rows"] = math.prod(rows)
    params["length"] = length
    return params[()]


def walk_params(
    shape: tuple[int, ...],
    arrays: Mapping[str, Strides],
    length: int,
    units: int,
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Fill the C struct ElementsParams of rows along axes that are merged already; an array of it.

    Raises
    ------
    ValueError
        If there are more axes than kernels walk.
    """
    _require_few(len(shape), ELEMENTS_AXES, shape, arrays, shown_as)
    missing = ELEMENTS_AXES - len(shape)
    params = new_struct(elements_params(len(arrays)))
    params["shape"] = (1,) * missing + shape
    params["strides"] = [(0,) * missing + axes for axes in arrays.values()]
    params["length"], params["rows"], params["units"] = length, math.prod(shape), units
    return params


def _require_few(
    left: int,
    most: int,
    shape: tuple[int, ...],
    arrays: Mapping[str, Strides],
    shown_as: Mapping[str, str],
) -> None:
    """Raise ValueError for too many axes, naming the arrays that have them by themselves, or all.

    `shown_as` has names for people.
    """
    if left <= most:
        return
    alone = {n: axes for n, axes in arrays.items() if len(merge_axes(shape, [axes])[0]) > most}
    at_fault = alone or arrays
    names = ", ".join(dict.fromkeys(shown_as.get(name, name) for name in at_fault))
    broadcast = any(0 in axes for axes in at_fault.values())
    raise error(
        ValueError,
        f"the strides of {names}{'' if alone else ' together'} leave {left} axes apart",
        f"at most {most} axes before the last, after merging those that lie evenly",
        f"copy with ascontiguousarray(...){', in its whole shape what broadcasts' * broadcast}, or "
        "reshape to fewer axes",
    )
