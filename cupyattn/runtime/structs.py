"""C structs that kernels take by value: their fields, and filling them from axes and strides.

A struct that `new_struct` returns raises ValueError for integers that do not fit a field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.spec import StructParameter

OUTER_AXES = 4
"""Axes before the last that row kernels support, after merging (kOuterAxes in rows.cuh)."""

ELEMENTS_AXES = 4
"""Axes before the rows that element kernels support (kElementsAxes in elements.cuh)."""


def rows_params(arrays: int) -> np.dtype:
    """Return the dtype of RowsParams<arrays> in cuda_src/common/rows.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (OUTER_AXES,)),
            ("strides", np.int64, (arrays, OUTER_AXES)),
            ("rows", np.int64),
            ("length", np.int64),
        ],
        align=True,
    )


def rows_struct(arrays: int) -> StructParameter:
    """Return RowsParams of this many arrays as a kernel's parameter."""
    return StructParameter("params", rows_params(arrays), "RowsParams")


def elements_params(arrays: int) -> np.dtype:
    """Return the dtype of ElementsParams<arrays> in cuda_src/common/elements.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (ELEMENTS_AXES,)),
            ("strides", np.int64, (arrays, ELEMENTS_AXES)),
            ("offsets", np.int64, (arrays,)),
            ("length", np.int64),
            ("rows", np.uint32),
            ("units", np.uint32),
        ],
        align=True,
    )


def elements_struct(arrays: int) -> StructParameter:
    """Return ElementsParams of this many arrays as a kernel's parameter."""
    return StructParameter("params", elements_params(arrays), "ElementsParams")


TOKEN_STRIDES = np.dtype([("batch", np.int64), ("seq", np.int64), ("head", np.int64)], align=True)
"""Strides of an array such as (B, S, H, D) whose last axis is contiguous."""


def new_struct(dtype: np.dtype) -> np.ndarray:
    """Return a struct of zeros, as a 0-d array. Set its fields, then take its ``[()]``.

    Setting a field, also of a nested struct, raises ValueError for an integer that does not fit.

    Examples
    --------
    >>> params = new_struct(np.dtype([("rows", np.int64), ("heads", np.int32)]))
    >>> params["rows"] = 2**31
    >>> params["heads"] = 2**31
    Traceback (most recent call last):
    ValueError: heads = 2147483648; kernels take heads as int32, -2147483648 to 2147483647; ...
    """
    return np.zeros((), dtype).view(_CheckedStruct)


def beyond(
    name: str,
    value: object,
    dtype: np.dtype,
    allowed: str = "",
    fix: str = "split the problem over several calls",
) -> ValueError:
    """Make the error for a number that does not fit a kernel's type."""
    if not allowed:
        holds = np.iinfo(dtype)
        allowed = f"{holds.min} to {holds.max}"
    passed = f"{name} = {shown(value)}"
    return error(ValueError, passed, f"kernels take {name} as {dtype.name}, {allowed}", fix)


class _CheckedStruct(np.ndarray):
    """A struct that `new_struct` returns, or a field of it that is a struct or an array."""

    field = ""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, _CheckedStruct):
            found.field = str(key)
        return found

    def __setitem__(self, key: Any, value: object) -> None:
        try:
            super().__setitem__(key, value)
        except OverflowError:
            name, dtype = (
                (key, self.dtype[key].base) if self.dtype.names else (self.field, self.dtype)
            )
            if dtype.kind not in "iu":
                raise
            raise beyond(name, value, dtype) from None


Strides = tuple[int, ...]
"""Strides of the axes of one shape, in items."""


def merge_axes(shape: tuple[int, ...], strides: list[Strides]) -> tuple[Strides, list[Strides]]:
    """Merge neighbouring axes whose strides are even in every array, and drop axes of extent 1.

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
        If more axes of rows remain than kernels support.
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


def element_params(
    shape: tuple[int, ...],
    arrays: Mapping[str, Strides],
    length: int,
    units: int,
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Fill the C struct ElementsParams for axes that are merged already; return an array of it.

    Raises
    ------
    ValueError
        If there are more axes than kernels support.
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
    """Raise ValueError for too many axes; name the arrays that have too many alone, or all arrays.

    `shown_as` has the names that errors use.
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
