"""The arguments of a kernel as ``cuLaunchKernel`` takes them: addresses of where each one lies."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from cupyattn.runtime.spec import KernelSpec

_WORD = 8
"""Bytes of an address, and the alignment of everything here."""


class PackedArguments:
    """One kernel's arguments, packed anew for each launch into the same memory.

    CuPy's own packing looks at each argument's type, which takes longer than the launch. It copies
    what it packs before a launch returns, and so does the driver: the memory may be filled again
    then, but not by two threads at a time. Every thread has its own.

    Attributes
    ----------
    address : int
        Of the array of addresses, one for each parameter.
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
        self._packed = memoryview(self._memory)  # asked for once: a buffer of ctypes takes longer
        self._pack_pointers = struct.Struct(f"{pointers}P").pack_into
        self._value_places = places[pointers:]
        self._values: tuple[Any, ...] = ()

    def fill(self, addresses: Sequence[int], values: tuple[Any, ...]) -> None:
        """Pack addresses of arrays, 0 for null, and what goes by value, which is typed already."""
        self._pack_pointers(self._packed, 0, *addresses)
        if values is not self._values:  # mostly a plan's, the same each time
            packed = self._values or (None,) * len(values)
            for place, value, there in zip(self._value_places, values, packed, strict=True):
                if value is not there:
                    content = value.tobytes()
                    ctypes.memmove(place, content, len(content))
            self._values = values
