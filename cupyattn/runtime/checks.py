"""Checks of arrays, options and overlapping memory that operations share, and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from numbers import Integral, Real
from types import MappingProxyType
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

from cupyattn.runtime.arrays import (
    WORKSPACE_FIX,
    Array,
    Description,
    Layout,
    Operands,
    is_contiguous,
    layouts_of,
    overlaps_itself,
    share_an_item,
    span,
)
from cupyattn.runtime.errors import MADE_BEFOREHAND, bool_fix, error, made_beforehand, shown
from cupyattn.runtime.plan import Output
from cupyattn.runtime.records import Record, fields_of, values_of

FLOATS = ("float16", "float32", "bfloat16")
CPU_FLOATS = (*FLOATS, "float64")
"""Dtypes of the CPU path; kernels have no float64."""
INTEGERS = ("int32", "int64")

_Options = ParamSpec("_Options")
_Checked = TypeVar("_Checked")


def checked_once(check: Callable[_Options, _Checked]) -> Callable[_Options, _Checked]:
    """Decorate a check of options so that it runs once for equal options of equal types.

    Options that cannot be hashed are checked in each call.
    """
    known: Callable[..., _Checked] = lru_cache(maxsize=4096, typed=True)(check)

    @wraps(check)
    def checked(*options: _Options.args, **named: _Options.kwargs) -> _Checked:
        try:
            return known(*options, **named)
        except TypeError:  # not hashable, or an error of the check, which is raised again below
            pass
        return check(*options, **named)

    return checked


def require_arrays(
    layouts: dict[str, Layout],
    names: Iterable[str],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError unless all named arrays were given; `shown_as` has the names in errors."""
    for name in names:
        require_given(shown_as.get(name, name), layouts.get(name))


def require_given(name: str, value: object) -> None:
    """Raise TypeError if an array that a call needs is None."""
    if value is None:
        raise error(
            TypeError,
            f"{name} is None",
            "it is not optional: a numpy.ndarray, cupy.ndarray or another library's CUDA array",
            f"pass an array as {name}",
        )


def require_kernel_dtype(name: str, dtype: np.dtype) -> None:
    """Raise TypeError for a dtype that only the CPU path takes."""
    if dtype.name not in FLOATS:
        raise error(
            TypeError,
            f"{name} has dtype {dtype.name} on a GPU or the emulator",
            f"kernels take {', '.join(FLOATS)}; {dtype.name} is for NumPy arrays on the CPU",
            f"convert the arrays, for example {name}.astype('float32'), or pass NumPy arrays "
            "outside of backend('emulator')",
        )


def require_bool(name: str, value: object) -> None:
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

    `fix` says what to do if a converted copy does not help.
    """
    dtype = layout.dtype
    if dtype.name not in allowed or not dtype.isnative:
        raise error(
            TypeError,
            f"{name} has dtype {layout.dtype_text}",
            f"allowed are {', '.join(allowed)}",
            fix or f"convert it, for example {_own(name)}.astype({_nearest(dtype, allowed)!r})",
        )


def contiguous_copy(name: str) -> str:
    """Return advice to pass a contiguous copy of an array instead."""
    return f"pass a contiguous copy, ascontiguousarray({_own(name)})"


def _own(name: str) -> str:
    """Return an array's name as an expression: "t" for "score_mod's t"."""
    return name.rpartition("'s ")[2]


def require_bool_mask(name: str, layout: Layout) -> None:
    """Raise TypeError unless a mask is of bool. Masks of numbers are usually meant to be added."""
    fix = (
        "pass what is added to the scores (0 and -inf) as bias=, and of a mask of 1 and 0 "
        f"pass {name} != 0 (True = keep)"
    )
    require_dtype(name, layout, ("bool",), fix)


def _nearest(dtype: np.dtype, allowed: tuple[str, ...]) -> str:
    """Return the dtype that loses least: the same in native order, float32, or the widest one."""
    if dtype.name in allowed:
        return dtype.name
    return "float32" if "float32" in allowed else allowed[-1]


def require_same_dtype(layouts: dict[str, Layout], names: Iterable[str] | None = None) -> None:
    """Raise TypeError unless the named arrays that are present have one dtype; by default all."""
    names = layouts if names is None else names
    present = {name: layouts[name].dtype for name in names if name in layouts}
    others = {name: dtype for name, dtype in present.items() if name != "dout"}
    if len(others) < len(present) and len({*others.values()}) == 1:
        name, dtype = next(iter(others.items()))
        if present["dout"] != dtype:
            raise error(
                TypeError,
                f"dout has dtype {layouts['dout'].dtype_text}",
                f"it is a gradient of {name}'s dtype, here {layouts[name].dtype_text}",
                f"convert it, for example dout.astype({dtype.name!r})",
            )
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
    """Return advice to add the axes that are probably missing: batch and heads."""
    missing = [letter for letter in letters if letter in ("B", "H", "G")][: len(letters) - rank]
    if letters[0] != "B" or rank + len(missing) != len(letters):
        return ""
    index = ", ".join("None" if letter in missing else ":" for letter in letters)
    while index.endswith(", :"):
        index = index[: -len(", :")]
    axes = "axis is" if len(missing) == 1 else "axes are"
    return f", for example {name}[{index}] where the {' and '.join(missing)} {axes} missing"


def require_contiguous_axis(name: str, layout: Layout, axis: object, *, written: bool) -> None:
    """Raise unless `axis` numbers an axis of the array, and that one is contiguous.

    A copy does not help for an array that is `written`: the caller would not see the result.
    """
    rank = len(layout.shape)
    if not isinstance(axis, Integral) or isinstance(axis, bool):
        raise error(
            TypeError,
            f"axis has type {type(axis).__name__}",
            "it must be an integer",
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
    """Raise ValueError unless the array has the shape that the other arrays require."""
    if layout.shape != expected:
        raise error(
            ValueError,
            f"{name} has shape {layout.shape}",
            f"{name} is {meaning}, here {expected}",
            "pass an array of that shape",
        )


def require_contiguous_rows(name: str, layout: Layout, fix: str = "") -> None:
    """Raise ValueError unless the last axis is contiguous and the strides are whole items."""
    itemsize = layout.dtype.itemsize
    if 0 in layout.shape:
        return
    if layout.shape and layout.shape[-1] > 1 and layout.strides[-1] != itemsize:
        repeated = " (it repeats one item, as broadcast_to does)" if not layout.strides[-1] else ""
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {itemsize} bytes{repeated}",
            "the last axis must be contiguous (other axes may have any stride)",
            fix or contiguous_copy(name),
        )
    require_whole_item_strides(name, layout, fix)


def require_whole_item_strides(name: str, layout: Layout, fix: str = "") -> None:
    """Raise ValueError unless every stride is a multiple of the item size."""
    if any(stride % layout.dtype.itemsize for stride in layout.strides):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides} for items of {layout.dtype.itemsize} bytes",
            "strides are whole numbers of items",
            fix or contiguous_copy(name),
        )


def require_item_alignment(
    layouts: dict[str, Layout],
    starts: dict[str, int],
    shown_as: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ValueError for an array that is not aligned to its items: reading it faults on a GPU.

    `starts` has the bytes by which each array starts beyond a multiple of 16; `shown_as` has the
    names that errors use.
    """
    for name, start in starts.items():
        itemsize = layouts[name].dtype.itemsize
        if start % itemsize:
            name = shown_as.get(name, name)
            raise error(
                ValueError,
                f"{name} starts {start % itemsize} bytes into an item of {itemsize}",
                "arrays are aligned to their items",
                f"copy it, for example {_own(name)}.copy(); for a result pass a new array",
            )


def require_output(name: str, layout: Layout, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise unless an output has the result's shape and dtype, and no item twice in memory."""
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
    """Raise ValueError if two items of an output array have one address."""
    if overlaps_itself(layout):
        raise error(
            ValueError,
            f"{name} has strides {layout.strides}: some of its items are one item in memory",
            "a result needs its own place for every item",
            "pass an array that is not a broadcast view",
        )


def fixes_of_results(*names: str) -> dict[str, str]:
    """Return the fixes in errors for results that are no arrays, by name."""
    return {name: MADE_BEFOREHAND.format(name) for name in names}


def require_workspace(layout: Layout) -> None:
    """Raise unless a workspace is contiguous in C order and has no Python objects."""
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
    """Say how many tokens a launch takes: none if one token has too many heads or features."""
    if most == 0:
        return f"one such token is more than a launch of {kernel} takes"
    return f"a launch of {kernel} takes at most {most} such tokens"


LARGEST = 1e38  # times log2(e) it is still a float32
_NO_NUMBERS = (bool, np.timedelta64)  # integers to Python's and NumPy's classes, but not here


def real(name: str, value: object) -> float:
    """Return an option as a float, or raise TypeError."""
    if type(value) is float:  # most are: asking for the class Real takes a microsecond
        return value
    if isinstance(value, Real) and not isinstance(value, _NO_NUMBERS):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # of either sign: no option takes it
    raise error(
        TypeError,
        f"{name} has type {type(value).__name__}",
        "it must be a real number",
        _conversion(value, "float"),
    )


def factor(name: str, value: object, *, least: float = -math.inf) -> float:
    """Return a factor as a float, or raise unless it is at most `LARGEST` and at least `least`."""
    number = real(name, value)
    if not abs(number) <= LARGEST:
        raise error(
            ValueError,
            f"{name} = {number}",
            f"it is a finite number up to {LARGEST:g}",
            "pass a smaller number",
        )
    if number < least:
        raise error(
            ValueError, f"{name} = {number}", f"it is {least:g} or more", "pass such a number"
        )
    return number


def integer(
    name: str,
    value: object,
    allowed: str = "it is an integer",
    fix: str = "",
) -> int:
    """Return an option as an int, or raise TypeError."""
    if type(value) is int:  # as of real
        return value
    if isinstance(value, Integral) and not isinstance(value, _NO_NUMBERS):
        return int(value)
    raise error(
        TypeError,
        f"{name} is {shown(value)} of type {type(value).__name__}",
        allowed,
        fix or _conversion(value, "int"),
    )


def _conversion(value: object, kind: str) -> str:
    # Python's int and float make no number of several.
    several = isinstance(value, list | tuple) or getattr(value, "shape", ()) != ()
    return "pass one number" if several else f"convert it with {kind}(...)"


class Meeting(NamedTuple):
    """A result and another array of a call, by field number, and the distances of an overlap.

    Their spans have common bytes if the other's first item is more than `least` and less than
    `most` bytes after the result's first item.
    """

    result: int
    other: int
    least: int
    most: int
    may_be_same: bool
    """Whether both may be one array, because each item is read before it is written."""


class Overlaps(NamedTuple):
    """The pairs of a call's arrays that may overlap in memory, found from their layouts.

    Arrays are numbered by the fields of the call's record.
    """

    pairs: tuple[tuple[int, int, int, int, bool], ...]
    """The fields of each `Meeting`; each call unpacks them, and plain tuples unpack faster."""
    results: tuple[int, ...]
    names: tuple[str, ...]
    """The name of each array in errors."""

    @classmethod
    def of(
        cls,
        layouts: Record[Layout],
        writes: Iterable[str],
        in_place: Mapping[str, str] = MappingProxyType({}),
        item_by_item: bool = False,
    ) -> Overlaps:
        """Pair each array of `writes` with every other array.

        `in_place` maps a result to the input that it may be itself. With `item_by_item` each result
        may be any array that is only read.
        """
        fields = fields_of(type(layouts))
        there = {n: each for n, each in enumerate(values_of(layouts)) if each}
        spans = {n: span(layout) for n, layout in there.items()}
        writes = frozenset(writes)
        results = tuple(n for n in there if fields[n] in writes)
        pairs = [
            Meeting(
                result,
                other,
                least=spans[result].start - spans[other].end,
                most=spans[result].end - spans[other].start,
                may_be_same=(
                    in_place.get(fields[result]) == fields[other]
                    or (item_by_item and other not in results)
                )
                and there[result] == there[other],
            )
            for result in results
            for other in there
            if other not in results or other > result
        ]
        names = tuple(layouts.SHOWN_AS.get(field, field) for field in fields)
        return cls(tuple((*pair,) for pair in pairs), results, names)

    def check(self, operands: Operands) -> None:
        """Raise ValueError if a result is read-only or shares an item with another array.

        Addresses decide almost every pair without looking at the layouts.
        """
        places = operands.places
        for result, other, least, most, may_be_same in self.pairs:
            distance = places[other] - places[result]
            if least < distance < most and not (may_be_same and distance == 0):
                self._check_items(operands, result, other)
        if self.results and operands.device_id is None:
            arrays = operands.arrays.VALUES(operands.arrays)
            for result in self.results:
                require_writable(self.names[result], arrays[result])

    def _check_items(self, operands: Operands, result: int, other: int) -> None:
        kind = type(operands.arrays)
        layouts = values_of(layouts_of(kind, operands.description))
        distance = operands.places[other] - operands.places[result]
        if share_an_item(layouts[result], layouts[other], distance):
            shown = self.names[result]
            raise error(
                ValueError,
                f"{shown} overlaps {self.names[other]} in memory",
                "both are written"
                if other in self.results
                else "results are written while inputs are still read",
                f"give {shown} memory of its own, or leave it out",
            )


def require_apart(operands: Operands, writes: Mapping[str, Output | None]) -> None:
    """Raise unless results and scratch memory fit and share no item with other arrays.

    `writes` maps the fields of results to the required shape and dtype, or to None if those are
    checked elsewhere.
    """
    kind = type(operands.arrays)
    writing = tuple(writes.items())
    _apart(kind, operands.description, writing).check(operands)  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _apart(
    kind: type[Record], description: Description, writes: tuple[tuple[str, Output | None], ...]
) -> Overlaps:
    layouts = layouts_of(kind, description)
    for name, output in writes:
        layout = getattr(layouts, name)
        if output is not None and layout is not None:
            require_output(kind.SHOWN_AS.get(name, name), layout, *output)
    workspace = getattr(layouts, "workspace", None)
    if workspace is not None:
        require_workspace(workspace)
    return Overlaps.of(layouts, ("workspace", *dict(writes)))


def require_writable(name: str, result: Array) -> None:
    """Raise ValueError if a NumPy array cannot be written."""
    if isinstance(result, np.ndarray) and not result.flags.writeable:
        raise error(
            ValueError,
            f"{name} is read-only",
            "results are written into it",
            made_beforehand(name),
        )
