"""C structs that kernels take by value: the layouts that families share, and how one is filled.

A struct that `new_struct` returns refuses integers that a field cannot hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.runtime.errors import error, shown
from cupyattn.runtime.spec import Struct

OUTER_AXES = 4
"""Axes before the last that a row-wise kernel can walk, after merging (kOuterAxes in rows.cuh)."""

ELEMENTS_AXES = 4
"""Axes before the rows that an element-wise kernel can walk (kElementsAxes in elements.cuh)."""


def rows_params(arrays: int) -> np.dtype:
    """RowsParams<arrays> in cuda_src/common/rows.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (OUTER_AXES,)),
            ("strides", np.int64, (arrays, OUTER_AXES)),
            ("rows", np.int64),
            ("length", np.int64),
        ],
        align=True,
    )


def rows_struct(arrays: int) -> Struct:
    """RowsParams of that many arrays, as a parameter."""
    return Struct("params", rows_params(arrays), "RowsParams")


def elements_params(arrays: int) -> np.dtype:
    """ElementsParams<arrays> in cuda_src/common/elements.cuh."""
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


def elements_struct(arrays: int) -> Struct:
    """ElementsParams of that many arrays, as a parameter."""
    return Struct("params", elements_params(arrays), "ElementsParams")


TOKEN_STRIDES = np.dtype([("batch", np.int64), ("seq", np.int64), ("head", np.int64)], align=True)
"""Of an array (B, S, H, D), or the like, whose last axis is contiguous."""


def new_struct(dtype: np.dtype) -> NDArray[Any]:
    """Return a struct of zeros, an array without axes: fill it by field, then take its ``[()]``.

    Setting a field, or one of a struct within, raises ValueError for an integer beyond its type.

    Examples
    --------
    >>> params = new_struct(np.dtype([("rows", np.int64), ("heads", np.int32)]))
    >>> params["rows"] = 2**31
    >>> params["heads"] = 2**31
    Traceback (most recent call last):
    ValueError: heads = 2147483648; kernels take heads as int32, -2147483648 to 2147483647; ...
    """
    return np.zeros((), dtype).view(_Record)


def beyond(name: str, value: Any, dtype: np.dtype) -> ValueError:
    """Return what to raise for an integer that a kernel's type does not hold."""
    holds = np.iinfo(dtype)
    return error(
        ValueError,
        f"{name} = {shown(value)}",
        f"kernels take {name} as {dtype.name}, {holds.min} to {holds.max}",
        "split the problem over several calls",
    )


class _Record(np.ndarray[Any, Any]):
    """A struct that `new_struct` returns, or a field of it that is a struct or an array."""

    field = ""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, _Record):
            found.field = str(key)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        try:
            super().__setitem__(key, value)
        except OverflowError:
            name, dtype = (
                (key, self.dtype[key].base) if self.dtype.names else (self.field, self.dtype)
            )
            if dtype.kind not in "iu":
                raise
            raise beyond(name, value, dtype) from None
