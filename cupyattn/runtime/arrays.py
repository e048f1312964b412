"""The arrays of a call: NumPy and CuPy as they are, CUDA arrays of other libraries by DLPack.

Nothing here copies or converts. CuPy is imported only when a call has a CUDA array, so NumPy users
do not need it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

import numpy as np

from cupyattn.runtime.array_protocol import Array as Array
from cupyattn.runtime.array_protocol import CudaArray as CudaArray
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import RefusalError, error, made_beforehand, shown
from cupyattn.runtime.fork import no_fork
from cupyattn.runtime.records import R, Record, made

ALIGNMENT = 16
"""Bytes. A vector load or store of a thread starts at a multiple of this."""

_CUDA_DLPACK_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_INTERFACE_VERSIONS = (0, 1, 2, 3)

_ARRAYS = (
    "arrays are numpy.ndarray, cupy.ndarray, or CUDA arrays with __cuda_array_interface__ or "
    "__dlpack__"
)


WORKSPACE_FIX = "pass an array of 'uint8', or none"


class Layout(NamedTuple):
    """An array's shape, strides and dtype. It is hashable, so it can be a key of caches."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def dtype_text(self) -> str:
        """The dtype's name, and its byte order if that is not native."""
        if self.dtype.kind in "US":  # their names count bits: str32 has one letter
            return {"U": "str", "S": "bytes"}[self.dtype.kind]
        return self.dtype.name + ("" if self.dtype.isnative else " in foreign byte order")

    def __str__(self) -> str:
        return f"{self.dtype_text} {self.shape}"


def contiguous(shape: tuple[int, ...], dtype: np.dtype) -> Layout:
    """Return the layout of an array that is contiguous in C order.

    Examples
    --------
    >>> contiguous((2, 3, 4), np.dtype(np.float32)).strides
    (48, 16, 4)
    """
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Layout(shape, tuple(strides), dtype)


def is_contiguous(layout: Layout) -> bool:
    """Tell whether the array is contiguous in C order."""
    dense = contiguous(layout.shape, layout.dtype).strides
    return 0 in layout.shape or all(
        extent == 1 or stride == expected
        for extent, stride, expected in zip(layout.shape, layout.strides, dense, strict=True)
    )


Described = tuple[tuple[int, ...], tuple[int, ...] | None, np.dtype, int]
"""An array's shape, strides and dtype, and its address modulo `ALIGNMENT`. The strides are None for
a CuPy array in C order: reading and hashing them takes as long as everything else."""

Description = tuple[Described | None, ...]
"""The arrays of a call, in the order of its record's fields."""


@dataclass(slots=True)  # made in each call: a named tuple takes longer
class Operands(Generic[R]):
    """The arrays of one call. All are of one library and on one device."""

    device_id: int | None
    """CUDA ordinal; None for NumPy arrays."""
    arrays: R
    places: list[int]
    """The address of each array's first item; 0 for an absent array."""
    description: Description
    """Everything that checks and plans depend on: a key for caches."""


def layouts_of(kind: type[R], description: Description) -> R:
    """Return the record of the arrays' layouts; `kind` is for example ``Norm[Layout]``."""
    return made(kind, map(_layout_of, description))


def _layout_of(described: Described | None) -> Layout | None:
    if described is None:
        return None
    shape, strides, dtype, _ = described
    return contiguous(shape, dtype) if strides is None else Layout(shape, strides, dtype)


def starts_of(kind: type[R], description: Description) -> R:
    """Return each array's address modulo `ALIGNMENT`."""
    return made(kind, (each and each[3] for each in description))


def adopt(record: R, fixes: Mapping[str, str] = MappingProxyType({})) -> Operands[R]:
    """Check the arrays of a call, and replace those of other libraries in the record.

    `fixes` maps names in errors to what the caller can pass instead of something that is no array.
    It is for results: the caller would never see a converted copy.

    Raises
    ------
    TypeError
        For something that is no array or cannot be used, and for a mixture of NumPy and CuPy
        arrays.
    ValueError
        For arrays on different devices.
    """
    # One pass: in a call on a GPU this loop costs more than anything but the driver.
    places: list[int] = []
    description: list[Described | None] = []
    first: int | None = _NO_ARRAY
    mixed = False
    device_kind = _device_array
    for array in record.VALUES(record):
        if array is None:
            places.append(0)
            description.append(None)
            continue
        if type(array) is device_kind:
            pointer = array.data
            device_id, place = pointer.device_id, pointer.ptr
            strides = None if array._c_contiguous else array.strides
        else:
            if type(array) is not _host_array:
                name = record.FIELDS[len(places)]
                array = adopt_one(record.SHOWN_AS.get(name, name), array, fixes)
                setattr(record, name, array)
            device_id, place, strides = _where(array)
        if device_id != first:
            mixed, first = first != _NO_ARRAY, device_id
        places.append(place)
        description.append((array.shape, strides, array.dtype, place % ALIGNMENT))
    if mixed:
        raise _mixed(record)
    return Operands(None if first == _NO_ARRAY else first, record, places, tuple(description))


def _where(array: Any) -> tuple[int | None, int, tuple[int, ...] | None]:
    """Return the device, the address and the strides of an array as `Described` has them."""
    if type(array) is _host_array:
        return None, array.ctypes.data, array.strides
    pointer = array.data
    return pointer.device_id, pointer.ptr, None if array._c_contiguous else array.strides


def _mixed(record: Record[Any]) -> TypeError | ValueError:
    """Return what to raise for arrays of two libraries or devices."""
    named = zip(record.FIELDS, record.VALUES(record), strict=True)
    shown_as = record.SHOWN_AS
    arrays = {shown_as.get(name, name): array for name, array in named if array is not None}
    if any(isinstance(array, np.ndarray) for array in arrays.values()):
        kinds = {name: type(array).__module__.partition(".")[0] for name, array in arrays.items()}
        return error(
            TypeError,
            ", ".join(f"{name} is {kind}" for name, kind in kinds.items()),
            "all arrays of a call are NumPy, or all are CuPy",
            "move them to one side with cupy.asarray(...) or cupy.asnumpy(...)",
        )
    return error(
        ValueError,
        ", ".join(f"{name} on device {array.data.device_id}" for name, array in arrays.items()),
        "all arrays of a call are on one device",
        "copy them there inside 'with cupy.cuda.Device(...)'",
    )


_NO_ARRAY = -1
"""The device of a call before its first array."""
_host_array = np.ndarray
_device_array: Any = None
"""cupy.ndarray, once a call had one. Arrays of exactly these two types need no conversion."""


def exports_memory(candidate: object) -> bool:
    """Tell whether something is meant as an array; `adopt` then says if it can be taken."""
    if isinstance(candidate, type):
        return False
    try:
        return hasattr(candidate, "__dlpack__") or hasattr(candidate, "__cuda_array_interface__")
    except Exception:
        return True


def adopt_one(name: str, candidate: Any, fixes: Mapping[str, str] = MappingProxyType({})) -> Array:
    """Check and convert one array as `adopt` does."""
    # CuPy has no ndarray yet while another thread imports it.
    device_array = getattr(sys.modules.get("cupy"), "ndarray", None)
    if device_array is not None and type(candidate) is device_array:
        global _device_array
        _device_array = device_array
        return candidate
    if isinstance(candidate, np.ndarray) and not isinstance(candidate, np.ma.MaskedArray):
        return candidate.view(np.ndarray)
    protocol = None if isinstance(candidate, type) else _cuda_protocol(name, candidate)
    if protocol is None:
        raise _no_array(name, candidate, fixes)
    return _cuda_array(name, candidate, protocol)


def _cuda_protocol(name: str, candidate: Any) -> str | None:
    """Return the protocol by which something exports memory of a GPU; None if there is none."""
    protocol = "__dlpack__"  # first: it supports bfloat16
    try:
        if hasattr(candidate, "__dlpack_device__"):
            device_type, _ = candidate.__dlpack_device__()
            if int(device_type) in _CUDA_DLPACK_DEVICES:
                return protocol
        protocol = "__cuda_array_interface__"
        if hasattr(candidate, protocol):
            version = candidate.__cuda_array_interface__["version"]
            if version not in _INTERFACE_VERSIONS:
                raise ValueError(f"version {shown(version)}")
            return protocol
    except RefusalError:
        raise
    except Exception as failure:  # another library's code may raise anything
        raise _broken(name, candidate, protocol, failure) from failure
    return None


def _cuda_array(name: str, candidate: object, protocol: str) -> Array:
    """Take an array of another library, which stays its owner."""
    try:
        cupy = load_cupy()
    except ImportError as failure:
        raise error(
            TypeError,
            f"{name} is a CUDA array, and CuPy did not import ({_cause(failure)})",
            "CUDA arrays need CuPy",
            "install it with pip install 'cupyattn[cuda12]' (or cuda13), or pass NumPy arrays",
        ) from failure
    try:
        array = (cupy.from_dlpack if protocol == "__dlpack__" else cupy.asarray)(candidate)
        if array.data.device_id < 0:
            raise ValueError("its memory is on no GPU")
    except Exception as failure:
        if type(failure).__name__ == "CUDARuntimeError" and not cupy.cuda.is_available():
            raise error(
                TypeError,
                f"{name} has type {_kind(candidate)} with {protocol}, and there is no GPU here "
                f"({_cause(failure)})",
                "CUDA arrays need a GPU and its driver",
                "pass NumPy arrays, which run on the CPU",
            ) from failure
        raise _broken(name, candidate, protocol, failure) from failure
    return array


def _no_array(name: str, candidate: object, fixes: Mapping[str, str]) -> TypeError:
    passed = f"{name} has type {_kind(candidate)}"
    own = name.rpartition("'s ")[2]  # the name in the caller's code: score_mod's t is t
    written = name.startswith(("grads", "workspace")) or fixes.get(name) == made_beforehand(name)
    fix = f"convert it, for example numpy.asarray({own}) or cupy.asarray({own})"
    if isinstance(candidate, type):
        passed = f"{name} is the class {candidate.__module__}.{candidate.__qualname__} itself"
        fix = "pass an array, which calling a function such as numpy.zeros makes"
    elif isinstance(candidate, np.ma.MaskedArray):
        fix = (
            "pass its .data, whose items are written whatever the mask says"
            if written
            else f"pass {own}.filled(...) of a value that you choose; what a function is to leave "
            "out, say with mask= where it takes one (True = keep: a numpy.ma mask is the opposite)"
        )
    elif name in fixes:
        fix = fixes[name]
    elif name == "workspace":
        fix = WORKSPACE_FIX
    elif written:  # grads, or one of them, grads.dx
        fix = made_beforehand(name)
    elif isinstance(candidate, Number | np.generic):  # an array of one has no axes
        fix = (
            "pass an array of the documented shape and dtype, for example "
            f"numpy.full(shape, {own}, dtype)"
        )
    elif _is_dlpack_alone(candidate):
        fix = f"convert it, for example numpy.from_dlpack({own})"
    return error(TypeError, passed, _ARRAYS, fix)


def _is_dlpack_alone(candidate: object) -> bool:
    """Tell whether NumPy takes something by DLPack alone: asarray would hold it as one object."""
    kind, others = type(candidate), ("__array__", "__array_interface__", "__array_struct__")
    return hasattr(kind, "__dlpack__") and not any(hasattr(kind, name) for name in others)


def _broken(name: str, candidate: object, protocol: str, failure: Exception) -> TypeError:
    return error(
        TypeError,
        f"{name} has type {_kind(candidate)}, whose {protocol} cannot be used ({_cause(failure)})",
        _ARRAYS,
        f"pass one of these: {name} is faulty, or its library has to prepare it for export",
    )


def _kind(candidate: object) -> str:
    return f"{type(candidate).__module__}.{type(candidate).__qualname__}"


def _cause(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def address(array: Array) -> int:
    """Return the address of the array's first item."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def array_within(memory: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return an array in C order within the memory of another, `offset` bytes after its start.

    Examples
    --------
    >>> array_within(np.arange(6, dtype=np.int64), 16, (2, 2), np.dtype(np.int64))
    array([[2, 3],
           [4, 5]])
    """
    if isinstance(memory, np.ndarray):
        end = offset + math.prod(shape) * dtype.itemsize
        return memory.reshape(-1).view(np.uint8)[offset:end].view(dtype).reshape(shape)
    # Made directly: slicing and viewing a CuPy array takes twice as long.
    kind: Any = type(memory)
    return kind(shape, dtype, memory.data + offset)


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name, including bfloat16, which NumPy alone does not know.

    Examples
    --------
    >>> dtype_of("bfloat16").itemsize
    2
    """
    if name == "bfloat16":
        with no_fork():
            import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


_SOMEWHERE = 1 << 62
"""An address in the middle of the address space."""
_MOST_CANDIDATES: Any = 100_000  # Any: to the stubs of NumPy 2.4 max_work is 0 or -1


class Span(NamedTuple):
    """The range of bytes that an array's items occupy, relative to its first item."""

    start: int
    end: int


def span(layout: Layout) -> Span:
    """Return the range of bytes of the items; it is empty for an empty array.

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


@lru_cache(maxsize=4096)
def share_an_item(a: Layout, b: Layout, distance: int) -> bool:
    """Tell whether two arrays share an item if b starts `distance` bytes after a.

    NumPy solves for a common address of stand-ins, whose memory it never touches. This is for
    arrays whose spans overlap, such as two slices of one packed array. Their distance is the same
    in the next call, so results are cached.
    """
    first, second = _StandIn(a, _SOMEWHERE), _StandIn(b, _SOMEWHERE + distance)
    try:
        return np.shares_memory(np.asarray(first), np.asarray(second), max_work=_MOST_CANDIDATES)
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
    """An array of that layout at an address, for questions about addresses alone."""

    def __init__(self, layout: Layout, place: int) -> None:
        self.__array_interface__ = {
            "data": (place, True),
            "shape": layout.shape,
            "strides": layout.strides,
            "typestr": f"|V{layout.dtype.itemsize}",
            "version": 3,
        }
