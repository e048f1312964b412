"""The base of devices without a GPU: they use NumPy arrays, which kernels get as arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.runtime.arrays import Array, Operands, array_within
from cupyattn.runtime.device import Device, traits_of
from cupyattn.runtime.device.traits import T4_L2_BYTES, DeviceTraits
from cupyattn.runtime.records import values_of
from cupyattn.runtime.tuning import USUAL, Choices


class SimulatedDevice:
    """A `Device` without `load`. Kernels get arrays instead of addresses, for their bounds."""

    l2_bytes = T4_L2_BYTES
    choices: Choices = USUAL
    null = None

    @property
    def traits(self: Device) -> DeviceTraits:
        """The properties that plans depend on."""
        return traits_of(self)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised NumPy array."""
        return np.empty(shape, dtype)

    def zero(self, array: Array) -> None:
        """Fill an array with zeros."""
        array.fill(0)

    def arguments(self, operands: Operands) -> list[Any]:
        """Return the arrays of a call, in a new list."""
        return [*values_of(operands.arrays)]

    def argument(self, array: Any) -> Any:
        """Return the array."""
        return array

    def argument_within(
        self, memory: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> Array:
        """Return an array in the memory of another."""
        return array_within(memory, offset, shape, dtype)
