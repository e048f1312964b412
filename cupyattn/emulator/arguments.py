"""Kernel arguments: what may be passed, and how it becomes the parameter buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyattn.emulator.errors import LaunchError
from cupyattn.emulator.machine.argument import Argument, check_byte_order
from cupyattn.emulator.machine.global_memory import DeviceMemory
from cupyattn.emulator.ptx.model import Function, Parameter

__all__ = ["Struct", "collect_arrays", "pack_parameters"]


class Struct:
    """A structure passed by value that holds pointers.

    Parameters
    ----------
    dtype : numpy.dtype
        Structured, aligned as the C structure is (``align=True``); pointers are ``uint64`` fields.
    values : mapping
        A value per field: a number, an array or `Argument` (becomes a pointer), None (null), or for
        a nested structure a tuple or ``numpy.void``. Fields left out are zero.

    Examples
    --------
    >>> import numpy as np
    >>> params = np.dtype([("x", "u8"), ("n", "i4")], align=True)
    >>> s = Struct(params, {"x": np.zeros(4, np.float32), "n": 4})
    >>> s.dtype.itemsize
    16
    """

    def __init__(self, dtype: Any, values: Mapping[str, Any]) -> None:
        try:
            self.dtype = np.dtype(dtype)
        except TypeError as error:
            raise LaunchError(f"the dtype of a Struct is {dtype!r}: {error}") from None
        if self.dtype.names is None or not isinstance(values, Mapping):
            raise LaunchError(
                f"Struct got {self.dtype} and a {type(values).__name__}; allowed: a structured "
                "dtype and a mapping of its fields to values"
            )
        check_byte_order(self.dtype)
        unknown = set(values) - set(self.dtype.names or ())
        if unknown:
            raise LaunchError(
                f"the structure has no fields {sorted(unknown)}; it has {self.dtype.names}"
            )
        self.values = {name: self._named(name, value) for name, value in values.items()}

    def _named(self, name: str, value: Any) -> Any:
        """Wrap arrays that become pointers, under the name of their field."""
        is_pointer = self.dtype[name] == np.uint64
        if is_pointer and isinstance(value, np.ndarray) and value.ndim:
            return Argument(value, name)
        if isinstance(value, Argument):
            if not is_pointer:
                raise LaunchError(
                    f"field {name!r} is {self.dtype[name]}; only uint64 fields hold pointers"
                )
            return value if value.name else replace(value, name=name)
        return value

    def arrays(self) -> list[Argument]:
        """Return the arrays that the structure points to."""
        return [value for value in self.values.values() if isinstance(value, Argument)]

    def pack(self, memory: DeviceMemory) -> bytes:
        """Return the bytes of the structure."""
        record = np.zeros((), self.dtype)
        for name, value in self.values.items():
            if isinstance(value, Argument):
                record[name] = memory.address(value.array)
            elif value is not None:
                try:
                    record[name] = value
                except (TypeError, ValueError, OverflowError) as error:
                    raise LaunchError(
                        f"field {name!r} of a Struct is {self.dtype[name]}, got {value!r:.60}: "
                        f"{error}"
                    ) from None
        return record.tobytes()


def collect_arrays(function: Function, args: Sequence[Any]) -> tuple[list[Any], list[Argument]]:
    """Check number and kind of the arguments; wrap arrays, and list all that is pointed to.

    Raises
    ------
    LaunchError
        Wrong number, kind or size of an argument.
    """
    if len(args) != len(function.parameters):
        names = ", ".join(f"{p.name} ({p.size} bytes)" for p in function.parameters)
        raise LaunchError(
            f"{function.name} takes {len(function.parameters)} arguments, got {len(args)}; "
            f"its parameters: {names or 'none'}"
        )
    wrapped: list[Any] = []
    arrays: list[Argument] = []
    for i, (parameter, value) in enumerate(zip(function.parameters, args, strict=True)):
        value = _check_argument(function, i, parameter, value)
        if isinstance(value, Argument):
            arrays.append(value)
        elif isinstance(value, Struct):
            arrays += value.arrays()
        wrapped.append(value)
    return wrapped, arrays


def _check_argument(function: Function, i: int, parameter: Parameter, value: Any) -> Any:
    where = f"{function.name}, argument {i} ({parameter.name}, .{parameter.type})"
    is_pointer = parameter.type in ("u64", "b64", "s64") and not parameter.is_array
    if isinstance(value, np.ndarray) and value.ndim:
        value = Argument(value, f"argument {i}")
    if value is None or isinstance(value, Argument):
        if not is_pointer:
            raise LaunchError(
                f"{where}: got {'None' if value is None else 'an array'}, but the parameter is "
                f"{parameter.size} bytes by value; pass a NumPy scalar, e.g. np.float32(x)"
            )
        if isinstance(value, Argument) and not value.name:
            value = replace(value, name=f"argument {i}")
        return value
    if isinstance(value, Struct):
        size: int = value.dtype.itemsize
    elif isinstance(value, (np.generic, np.ndarray)):
        size = value.dtype.itemsize
        check_byte_order(value.dtype)
    else:
        raise LaunchError(
            f"{where}: got a {type(value).__name__}; allowed are NumPy arrays (pointers), NumPy "
            "scalars (np.int32(3), not 3), structured scalars, Struct, and None (null pointer)"
        )
    if size != parameter.size:
        raise LaunchError(
            f"{where}: got {size} bytes ({getattr(value, 'dtype', '')}), the kernel expects "
            f"{parameter.size}; convert the scalar to the kernel's type"
        )
    if isinstance(value, (np.generic, np.ndarray)) and not parameter.is_array:
        is_float = value.dtype.kind == "f"
        if (
            value.dtype.kind not in "fiub"
            or (parameter.type in ("f32", "f64") and not is_float)
            or (parameter.type[0] in "us" and is_float and parameter.size > 2)
        ):
            raise LaunchError(
                f"{where}: got {value.dtype}; convert the scalar to the kernel's type"
            )
    return value


def pack_parameters(function: Function, values: Sequence[Any], memory: DeviceMemory) -> bytes:
    """Return the parameter buffer."""
    buffer = bytearray(function.parameter_bytes)
    for parameter, value in zip(function.parameters, values, strict=True):
        if value is None:
            data = bytes(parameter.size)
        elif isinstance(value, Argument):
            data = memory.address(value.array).to_bytes(8, "little")
        elif isinstance(value, Struct):
            data = value.pack(memory)
        else:
            data = np.asarray(value).tobytes()
        buffer[parameter.offset : parameter.offset + parameter.size] = data
    return bytes(buffer)
