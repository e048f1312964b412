"""Arrays that a kernel is given the address of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyattn.emulator.errors import LaunchError

__all__ = ["Argument", "check_byte_order"]


def check_byte_order(dtype: np.dtype[Any]) -> None:
    """Refuse numbers that the kernel would read wrong."""
    if not dtype.isnative:
        raise LaunchError(
            f"got {dtype.str if dtype.names is None else dtype}, numbers in the other byte order; "
            "allowed: the byte order of the machine, which the kernel reads: "
            "x.astype(x.dtype.newbyteorder('='))"
        )


@dataclass
class Argument:
    """A pointer argument with what the checks should know about it.

    Attributes
    ----------
    array : numpy.ndarray
        Any strides; the kernel gets the address of element 0 and writes through to it.
    name : str
        For messages; the parameter's own name if empty.
    const : bool
        Stores to it are errors. Arrays that NumPy has marked read-only are const anyway.
    exact : bool
        Of a strided view, only the elements may be touched (default); False allows the whole range
        of bytes that the view spans.
    """

    array: np.ndarray
    name: str = ""
    const: bool = False
    exact: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.array, np.ndarray):
            raise LaunchError(
                f"Argument.array is a {type(self.array).__name__}; allowed: a NumPy array; the "
                "kernel gets its address"
            )
        if self.array.dtype.hasobject:
            raise LaunchError(
                "an array of Python objects; allowed: arrays of numbers (give it a dtype)"
            )
        check_byte_order(self.array.dtype)

    @property
    def covers_range(self) -> bool:
        """Whether every byte between the first and the last may be touched."""
        if not self.exact or self.array.flags.c_contiguous or self.array.flags.f_contiguous:
            return True
        # a transposed contiguous array has no gaps either
        axes = sorted(zip(self.array.strides, self.array.shape, strict=True))
        expected = self.array.itemsize
        for stride, extent in axes:
            if extent == 1:
                continue
            if stride != expected:
                return False
            expected *= extent
        return True
