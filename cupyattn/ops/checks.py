"""Checks that every operation makes of its arrays, with the errors they raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cupyattn.arrays import Array, Layout, Span, overlaps_itself, share_an_item
from cupyattn.errors import error

FLOATS = ("float16", "float32", "bfloat16")
INTEGERS = ("int32", "int64")


def require_arrays(layouts: dict[str, Layout], names: Iterable[str]) -> None:
    """Raise TypeError unless all named arrays were given."""
    for name in names:
        if name not in layouts:
            raise error(
                TypeError,
                f"{name} is None",
                "it is not optional: a numpy.ndarray, cupy.ndarray or another library's CUDA array",
                f"pass an array as {name}",
            )


def require_bool(name: str, value: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise error(
            TypeError,
            f"{name} = {value!r}",
            "it is True or False",
            f"convert it with bool({name})",
        )


def require_dtype(name: str, layout: Layout, allowed: tuple[str, ...]) -> None:
    """Raise TypeError unless the array has one of the dtypes, in native byte order."""
    dtype = layout.dtype
    if dtype.name not in allowed or not dtype.isnative:
        raise error(
            TypeError,
            f"{name} has dtype {layout.dtype_text}",
            f"allowed are {', '.join(allowed)}",
            f"convert it, for example {name}.astype({_nearest(dtype, allowed)!r})",
        )


def _nearest(dtype: np.dtype, allowed: tuple[str, ...]) -> str:
    """Return what loses least: the same in native order, float32, or the widest of the others."""
    if dtype.name in allowed:
        return dtype.name
    return "float32" if "float32" in allowed else allowed[-1]


def require_same_dtype(layouts: dict[str, Layout], names: Iterable[str]) -> None:
    """Raise TypeError unless all named arrays that are present have one dtype."""
    present = {name: layouts[name].dtype for name in names if name in layouts}
    if len(set(present.values())) > 1:
        listed = ", ".join(f"{name} has {dtype.name}" for name, dtype in present.items())
        raise error(
            TypeError,
            listed,
            f"{', '.join(present)} share one dtype",
            "convert them to one with .astype(...)",
        )


def require_rank(name: str, layout: Layout, axes: str) -> None:
    """Raise ValueError unless the array has as many axes as `axes` names, as in "B S H D"."""
    letters = axes.split()
    if len(layout.shape) != len(letters):
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"{name} is ({', '.join(letters)}), {len(letters)} axes",
            f"reshape it, for example {name}[None] where the batch axis is missing",
        )


def require_shape(name: str, layout: Layout, expected: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless the array has the shape that follows from the others."""
    if layout.shape != expected:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"{name} is {meaning}, here {expected}",
            "pass an array of that shape",
        )


def require_contiguous_rows(name: str, layout: Layout) -> None:
    """Raise ValueError unless the last axis is contiguous and the strides are whole items."""
    itemsize = layout.dtype.itemsize
    if 0 in layout.shape:
        return
    if layout.shape and layout.shape[-1] > 1 and layout.strides[-1] != itemsize:
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {itemsize} bytes",
            "the last axis must be contiguous (other axes may have any stride)",
            f"copy it with ascontiguousarray({name})",
        )
    require_whole_item_strides(name, layout)


def require_whole_item_strides(name: str, layout: Layout) -> None:
    """Raise ValueError unless every stride is a multiple of the item size."""
    if any(stride % layout.dtype.itemsize for stride in layout.strides):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {layout.dtype.itemsize} bytes",
            "strides are whole numbers of items",
            f"copy it with ascontiguousarray({name})",
        )


def require_item_alignment(layouts: dict[str, Layout], starts: dict[str, int]) -> None:
    """Raise ValueError if an array starts within an item: a GPU faults when it reads that.

    `starts` says by how many bytes each array starts beyond a multiple of 16.
    """
    for name, start in starts.items():
        itemsize = layouts[name].dtype.itemsize
        if start % itemsize:
            raise error(
                ValueError,
                f"{name} starts {start % itemsize} bytes into an item of {itemsize}",
                "arrays are aligned to their items",
                f"copy it, for example {name}.copy()",
            )


def require_output(name: str, layout: Layout, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise unless an array given to be written has the result's shape and dtype, and own items."""
    if layout.shape != shape or layout.dtype != dtype:
        raise error(
            ValueError if layout.dtype == dtype else TypeError,
            f"{name} is {layout}",
            f"the result is {dtype.name} {shape}",
            "pass an array of that shape and dtype, or none",
        )
    require_contiguous_rows(name, layout)
    if overlaps_itself(layout):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides}: some of its items are one item in memory",
            "a result needs an own place for every item",
            "pass an array that is not a broadcast view",
        )


def require_disjoint(
    results: Iterable[str],
    arrays: dict[str, Array],
    places: dict[str, int],
    spans: dict[str, Span],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ValueError if an array to be written is read-only or shares an item with another.

    `spans` has where the items of each array lie from its first item, `places` where that is: this
    settles almost every pair. `shown_as` has names for people where they are others.
    """
    results = tuple(results)
    for name in results:
        result = arrays.get(name)
        if result is None:
            continue
        shown = shown_as.get(name, name)
        _require_writable(shown, result)
        start, end = spans[name]
        start, end = places[name] + start, places[name] + end
        for other, place in places.items():
            other_start, other_end = spans[other]
            if other == name or place + other_end <= start or end <= place + other_start:
                continue
            if share_an_item(result, arrays[other]):
                raise error(
                    ValueError,
                    f"{shown} overlaps {shown_as.get(other, other)} in memory",
                    "both are written"
                    if other in results
                    else "results are written while inputs are still read",
                    f"give {shown} memory of its own, or leave it out",
                )


def _require_writable(name: str, result: Array) -> None:
    if isinstance(result, np.ndarray) and not result.flags.writeable:
        raise error(
            ValueError,
            f"{name} is read-only",
            "results are written into it",
            f"pass a writable array, for example {name}.copy()",
        )
