"""Arrays as they come in: NumPy or CuPy as they are, other libraries' CUDA arrays by DLPack.

Nothing here copies or converts. CuPy is looked up only when a CUDA array has been seen, so that
NumPy users need not have it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from cupyattn.errors import error

Array = Any
"""A numpy.ndarray or a cupy.ndarray."""

Library = Literal["numpy", "cupy"]

_CUDA_DLPACK_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged

_MOST_CANDIDATES: Any = 100_000  # Any: to the stubs of NumPy 2.4 max_work is 0 or -1


class Layout(NamedTuple):
    """What is known of an array without its memory: hashable, a key for caches."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def dtype_text(self) -> str:
        """The dtype's name, and its byte order where that is not the machine's."""
        return self.dtype.name + ("" if self.dtype.isnative else " in foreign byte order")

    def __str__(self) -> str:
        return f"{self.dtype_text} {self.shape}"


LayoutKey = tuple[tuple[str, tuple[int, ...], tuple[int, ...], np.dtype], ...]
"""Name, shape, strides and dtype of each array of a call."""


class Operands(NamedTuple):
    """The arrays of one call by name, absent ones left out, all of one library and one device."""

    library: Library
    device_id: int
    """CUDA ordinal; -1 for NumPy arrays."""
    arrays: dict[str, Array]

    def layout_key(self) -> LayoutKey:
        """Return all that is known without looking at memory, as a key for caches."""
        return tuple([(name, a.shape, a.strides, a.dtype) for name, a in self.arrays.items()])


def layouts_of(key: LayoutKey) -> dict[str, Layout]:
    """Return the layout of each array by name."""
    return {name: Layout(shape, strides, dtype) for name, shape, strides, dtype in key}


def adopt(candidates: dict[str, Any]) -> Operands:
    """Take the arrays of a call, by name; None stands for an option that was not given.

    Raises
    ------
    TypeError
        For something that is no array, and for a mixture of NumPy and CuPy arrays.
    ValueError
        For arrays on different devices.
    """
    arrays = {name: array for name, array in candidates.items() if array is not None}
    kinds = set(map(type, arrays.values()))
    if not kinds <= _own_kinds():
        arrays = {name: _adopt_one(name, array) for name, array in arrays.items()}
        kinds = {type(array) for array in arrays.values()}
    if kinds <= {np.ndarray}:
        return Operands("numpy", -1, arrays)
    if np.ndarray in kinds:
        raise _mixed_libraries(arrays)
    devices = {array.data.device_id for array in arrays.values()}
    if len(devices) > 1:
        raise _mixed_devices(arrays)
    return Operands("cupy", devices.pop(), arrays)


def _own_kinds() -> set[type]:
    """Return the array types that are taken as they are; CuPy's only once someone imported it."""
    cupy = sys.modules.get("cupy")
    return {np.ndarray} if cupy is None else {np.ndarray, cupy.ndarray}


def _adopt_one(name: str, candidate: Any) -> Array:
    if type(candidate) in _own_kinds():
        return candidate
    if isinstance(candidate, np.ndarray) and not isinstance(candidate, np.ma.MaskedArray):
        return candidate.view(np.ndarray)
    if hasattr(candidate, "__dlpack_device__"):  # first: it has a name for bfloat16
        device_type, _ = candidate.__dlpack_device__()
        if int(device_type) in _CUDA_DLPACK_DEVICES:
            return _cupy().from_dlpack(candidate)
    if hasattr(candidate, "__cuda_array_interface__"):
        return _cupy().asarray(candidate)
    raise error(
        TypeError,
        f"{name} is a {type(candidate).__module__}.{type(candidate).__qualname__}",
        "arrays are numpy.ndarray, cupy.ndarray, or CUDA arrays with __cuda_array_interface__ or "
        "__dlpack__",
        f"convert it, for example numpy.asarray({name}) or cupy.asarray({name})",
    )


def _cupy() -> Any:
    import cupy

    return cupy


def _mixed_libraries(arrays: dict[str, Array]) -> TypeError:
    kinds = {name: type(array).__module__.partition(".")[0] for name, array in arrays.items()}
    listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
    return error(
        TypeError,
        listed,
        "all arrays of a call are NumPy, or all are CuPy",
        "move them to one side with cupy.asarray(...) or cupy.asnumpy(...)",
    )


def _mixed_devices(arrays: dict[str, Array]) -> ValueError:
    listed = ", ".join(f"{name} on device {a.data.device_id}" for name, a in arrays.items())
    return error(
        ValueError,
        listed,
        "all arrays of a call are on one device",
        "copy them there inside 'with cupy.cuda.Device(...)'",
    )


def address(array: Array) -> int:
    """Return where the array's first item is, in its own memory space."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def addresses(arrays: dict[str, Array]) -> dict[str, int]:
    """Return where each array's first item is."""
    return {name: address(array) for name, array in arrays.items()}


def alignments(places: Iterable[int], width: int) -> tuple[int, ...]:
    """Return by how many bytes each address lies beyond a multiple of `width`."""
    return tuple([place % width for place in places])


class Span(NamedTuple):
    """The bytes that an array's items lie in, counted from its first item."""

    start: int
    end: int


def span(layout: Layout) -> Span:
    """Return where the items lie; nowhere for an empty array.

    Examples
    --------
    >>> span(Layout((3, 2), (-8, 4), np.dtype(np.float32)))
    Span(start=-16, end=8)
    """
    if 0 in layout.shape:
        return Span(0, 0)
    steps = [(n - 1) * stride for n, stride in zip(layout.shape, layout.strides, strict=True)]
    return Span(
        sum(step for step in steps if step < 0),
        sum(step for step in steps if step > 0) + layout.dtype.itemsize,
    )


def share_an_item(a: Array, b: Array) -> bool:
    """Tell whether two arrays have an item in common; exact, for device memory too.

    NumPy solves for a common address on stand-ins, whose memory it never touches. For operations to
    ask where `span` says that two arrays meet, as two slices of one packed array do.
    """
    try:
        return np.shares_memory(_stand_in(a), _stand_in(b), max_work=_MOST_CANDIDATES)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(layout: Layout) -> bool:
    """Tell whether two indices of an array may name one item, as in a broadcast view.

    Exact for views made by slicing, transposing and broadcasting; some arrays from as_strided whose
    axes interleave are taken for overlapping too.
    """
    if 0 in layout.shape:
        return False
    reach = layout.dtype.itemsize
    for stride, extent in sorted(
        (abs(stride), extent) for stride, extent in zip(layout.strides, layout.shape, strict=True)
    ):
        if extent <= 1:
            continue
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False


class _StandIn:
    """An array of the same addresses, for questions about addresses alone."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "data": (address(array), True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }


def _stand_in(array: Array) -> np.ndarray:
    return np.asarray(_StandIn(array))
