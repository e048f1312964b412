"""Packing of a kernel's arguments for ``cuLaunchKernel``, which takes their addresses."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from cupyattn.runtime.spec import KernelSpec, Value

_WORD = 8
"""Bytes of an address. All arguments have this alignment."""


class PackedArguments:
    """Memory for one kernel's arguments, which each launch fills again.

    CuPy's own packing checks each argument's type, which takes longer than the launch. The driver
    copies the arguments before a launch returns. After that the memory may be filled again, but not
    by two threads at a time, so every thread has its own.

    Attributes
    ----------
    address : int
        The address of the array of addresses, one for each parameter.
    """

    def __init__(self, spec: KernelSpec) -> None:
        pointers = len(spec.pointers)
        by_value = [parameter.dtype for parameter in spec.parameters[pointers:]]  # type: ignore[union-attr]
        sizes = [_WORD] * pointers + [-(-dtype.itemsize // _WORD) * _WORD for dtype in by_value]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._memory = ctypes.create_string_buffer(max(sum(sizes), 1))
        places = [ctypes.addressof(self._memory) + start for start in starts]
        self._table = (ctypes.c_void_p * max(len(places), 1))(*places)
        self.address = ctypes.addressof(self._table)
        self._packed = memoryview(self._memory)  # a memoryview is faster than a buffer of ctypes
        self._pack_pointers = struct.Struct(f"{pointers}P").pack_into
        self._value_places = places[pointers:]
        self._values: tuple[Value, ...] = ()

    def fill(self, addresses: Sequence[int], values: tuple[Value, ...]) -> None:
        """Pack addresses of arrays, 0 for null, and values, which have their C types."""
        self._pack_pointers(self._packed, 0, *addresses)
        if values is not self._values:  # a plan's values are the same tuple in each call
            packed = self._values or (None,) * len(values)
            for place, value, there in zip(self._value_places, values, packed, strict=True):
                if value is not there:
                    content = value.tobytes()
                    ctypes.memmove(place, content, len(content))
            self._values = values
