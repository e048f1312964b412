"""Checks that every operation makes of its arrays, with the errors they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from numbers import Integral
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from cupyattn.runtime.arrays import WORKSPACE_FIX, Layout, is_contiguous
from cupyattn.runtime.errors import bool_fix, error, made_beforehand, shown
from cupyattn.runtime.spans import overlaps_itself

FLOATS = ("float16", "float32", "bfloat16")
CPU_FLOATS = (*FLOATS, "float64")
"""What the CPU path computes with; kernels have no float64."""
INTEGERS = ("int32", "int64")

_Options = ParamSpec("_Options")
_Checked = TypeVar("_Checked")


def checked_once(check: Callable[_Options, _Checked]) -> Callable[_Options, _Checked]:
    """Decorate a check of options so that it runs once for equal options of equal types.

    Options that have no hash are checked in each call.
    """
    known: Callable[..., _Checked] = lru_cache(maxsize=4096, typed=True)(check)

    @wraps(check)
    def checked(*options: _Options.args, **named: _Options.kwargs) -> _Checked:
        try:
            return known(*options, **named)
        except TypeError:  # no hash, or an error of the check: raised again below, on its own
            pass
        return check(*options, **named)

    return checked


def require_arrays(
    layouts: dict[str, Layout],
    names: Iterable[str],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError unless all named arrays were given; `shown_as` has names for people."""
    for name in names:
        require_given(shown_as.get(name, name), layouts.get(name))


def require_given(name: str, value: object) -> None:
    """Raise TypeError for None in the place of an array that a call needs."""
    if value is None:
        raise error(
            TypeError,
            f"{name} is None",
            "it is not optional: a numpy.ndarray, cupy.ndarray or another library's CUDA array",
            f"pass an array as {name}",
        )


def require_kernel_dtype(name: str, dtype: np.dtype) -> None:
    """Raise TypeError for arrays that only the CPU path takes."""
    if dtype.name not in FLOATS:
        raise error(
            TypeError,
            f"{name} has dtype {dtype.name} on a GPU or the emulator",
            f"kernels take {', '.join(FLOATS)}; {dtype.name} is for NumPy arrays on the CPU",
            f"convert the arrays, for example {name}.astype('float32'), or pass NumPy arrays "
            "outside of backend('emulator')",
        )


def require_bool(name: str, value: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if type(value) is not bool and not isinstance(value, np.bool_):
        raise error(
            TypeError,
            f"{name} = {shown(value)}",
            "it is True or False",
            bool_fix(name, value),
        )


def require_dtype(name: str, layout: Layout, allowed: tuple[str, ...], fix: str = "") -> None:
    """Raise TypeError unless the array has one of the dtypes, in native byte order.

    `fix` says what to do, where a converted copy would not do.
    """
    dtype = layout.dtype
    if dtype.name not in allowed or not dtype.isnative:
        raise error(
            TypeError,
            f"{name} has dtype {layout.dtype_text}",
            f"allowed are {', '.join(allowed)}",
            fix or f"convert it, for example {_own(name)}.astype({_nearest(dtype, allowed)!r})",
        )


def _own(name: str) -> str:
    """Name an array as Python would: "t" is score_mod's t."""
    return name.rpartition("'s ")[2]


def require_bool_mask(name: str, layout: Layout) -> None:
    """Raise TypeError unless a mask is of bool; one of numbers is mostly meant to be added."""
    fix = (
        "pass what is added to the scores (0 and -inf) as bias=, and of a mask of 1 and 0 "
        f"pass {name} != 0 (True = keep)"
    )
    require_dtype(name, layout, ("bool",), fix)


def _nearest(dtype: np.dtype, allowed: tuple[str, ...]) -> str:
    """Return what loses least: the same in native order, float32, or the widest of the others."""
    if dtype.name in allowed:
        return dtype.name
    return "float32" if "float32" in allowed else allowed[-1]


def require_same_dtype(layouts: dict[str, Layout], names: Iterable[str] | None = None) -> None:
    """Raise TypeError unless all arrays, or those of the named that are present, have one dtype."""
    names = layouts if names is None else names
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
            "reshape it" + _with_missing_axes(name, letters, len(layout.shape)),
        )


def _with_missing_axes(name: str, letters: list[str], rank: int) -> str:
    """Say how to add the axes that are most likely missing: the batch, and the heads."""
    missing = [letter for letter in letters if letter in ("B", "H", "G")][: len(letters) - rank]
    if letters[0] != "B" or rank + len(missing) != len(letters):
        return ""
    index = ", ".join("None" if letter in missing else ":" for letter in letters)
    while index.endswith(", :"):
        index = index[: -len(", :")]
    axes = "axis is" if len(missing) == 1 else "axes are"
    return f", for example {name}[{index}] where the {' and '.join(missing)} {axes} missing"


def require_contiguous_axis(name: str, layout: Layout, axis: Any, *, written: bool) -> None:
    """Raise unless `axis` numbers an axis of the array, and that one is contiguous.

    Of an array to be `written` nobody would see a copy that is made in the call.
    """
    rank = len(layout.shape)
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise error(
            TypeError,
            f"axis is a {type(axis).__name__}",
            "it is an integer",
            "pass the axis that is contiguous, -1 in C order",
        )
    if rank == 0:
        raise error(ValueError, f"{name} has no axes", "there has to be one", f"pass {name}[None]")
    if not -rank <= int(axis) < rank:
        raise error(
            ValueError,
            f"axis = {shown(axis)} of {name} with {rank} axes",
            f"it is at least {-rank} and below {rank}",
            "pass the axis that is contiguous, -1 in C order",
        )
    extent, stride = layout.shape[axis], layout.strides[axis]
    if extent > 1 and 0 not in layout.shape and stride != layout.dtype.itemsize:
        copy = f"numpy.moveaxis(numpy.moveaxis({name}, {axis}, -1).copy(), -1, {axis})"
        raise error(
            ValueError,
            f"axis {axis} of {name} has a stride of {stride} bytes",
            f"the axis to run over is contiguous, {layout.dtype.itemsize} bytes an item",
            f"make {copy} before the call, pass it as {name} and read that"
            if written
            else f"pass a copy in which it is, {copy}",
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


def require_contiguous_rows(name: str, layout: Layout, fix: str = "") -> None:
    """Raise ValueError unless the last axis is contiguous and the strides are whole items."""
    fix = fix or f"copy it with ascontiguousarray({_own(name)})"
    itemsize = layout.dtype.itemsize
    if 0 in layout.shape:
        return
    if layout.shape and layout.shape[-1] > 1 and layout.strides[-1] != itemsize:
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {itemsize} bytes",
            "the last axis must be contiguous (other axes may have any stride)",
            fix,
        )
    require_whole_item_strides(name, layout, fix)


def require_whole_item_strides(name: str, layout: Layout, fix: str = "") -> None:
    """Raise ValueError unless every stride is a multiple of the item size."""
    if any(stride % layout.dtype.itemsize for stride in layout.strides):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {layout.dtype.itemsize} bytes",
            "strides are whole numbers of items",
            fix or f"copy it with ascontiguousarray({_own(name)})",
        )


def require_item_alignment(
    layouts: dict[str, Layout],
    starts: dict[str, int],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ValueError if an array starts within an item: a GPU faults when it reads that.

    `starts` says by how many bytes each array starts beyond a multiple of 16; `shown_as` has names
    for people.
    """
    for name, start in starts.items():
        itemsize = layouts[name].dtype.itemsize
        if start % itemsize:
            name = shown_as.get(name, name)
            raise error(
                ValueError,
                f"{name} starts {start % itemsize} bytes into an item of {itemsize}",
                "arrays are aligned to their items",
                f"copy it, for example {_own(name)}.copy(); make a result anew before the call",
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
    require_contiguous_rows(name, layout, made_beforehand(name))
    require_own_items(name, layout)


def require_own_items(name: str, layout: Layout) -> None:
    """Raise ValueError if two items of an array to be written are one in memory."""
    if overlaps_itself(layout):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides}: some of its items are one item in memory",
            "a result needs an own place for every item",
            "pass an array that is not a broadcast view",
        )


def fixes_of_results(*names: str) -> dict[str, str]:
    """Return what to pass instead of what is no array, for arrays that a call writes."""
    return {name: made_beforehand(name) for name in names}


def require_workspace(layout: Layout) -> None:
    """Raise unless an array given as workspace is plain memory in C order."""
    if layout.dtype.hasobject:
        raise error(
            TypeError,
            f"workspace has dtype {layout.dtype.name}",
            "it is memory to be written, of any dtype without Python objects",
            WORKSPACE_FIX,
        )
    if not is_contiguous(layout):
        raise error(
            ValueError,
            f"workspace has strides {layout.strides}, not contiguous in C order",
            "it is memory in one piece",
            WORKSPACE_FIX,
        )


def most_tokens(kernel: str, most: int) -> str:
    """Tell how many tokens a launch takes; none if a single one has too many heads or features."""
    if most == 0:
        return f"one such token is more than a launch of {kernel} takes"
    return f"a launch of {kernel} takes at most {most} such tokens"
