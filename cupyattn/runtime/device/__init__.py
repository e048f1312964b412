"""The protocols of devices, which allocate arrays and load and start kernels.

Operations use only these protocols. They are implemented for a GPU through CuPy (`CudaDevice`), for
the emulator (`EmulatedDevice`) and for recording launches (`LaunchRecorder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cupyattn.runtime.arch import Arch
from cupyattn.runtime.arrays import Array, Operands
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.spec import Specialisation, Value
from cupyattn.runtime.tuning import Choices


class LoadedKernel(Protocol):
    """A loaded kernel, ready to start on one device."""

    specialisation: Specialisation

    def start(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], values: tuple[Value, ...]
    ) -> None:
        """Start the kernel on the current stream; `values` have their C types (see `launch`).

        `arguments` are the device's arguments for arrays, and its `null` for absent arrays. The
        values of a plan are the same tuple in each call.
        """


class Device(Protocol):
    """A device that executes kernels."""

    arch: Arch
    """The architecture for which kernels are compiled."""
    multiprocessors: int
    """The number of multiprocessors, which sets the grid of kernels that loop over their work."""
    l2_bytes: int
    """The size of the L2 cache."""
    choices: Choices
    """The configurations that calls use instead of the usual ones."""

    null: Any
    """The argument for an absent array."""

    @property
    def traits(self) -> DeviceTraits:
        """The current values of these attributes, as a key for caches of plans."""

    @property
    def tensor_cores(self) -> bool:
        """Whether float16 uses kernels with tensor cores."""

    @property
    def name(self) -> str:
        """The device's name in messages."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return an uninitialised C-contiguous array."""

    def zero(self, array: Array) -> None:
        """Fill an array of this device with zeros, on the current stream."""

    def arguments(self, operands: Operands) -> list[Any]:
        """Return the arguments for the arrays of a call, in a new list.

        Kernels on a GPU get addresses, which `operands` has. Kernels on the emulator get the arrays
        themselves, because it has to know where arrays end.
        """

    def argument(self, array: Any) -> Any:
        """Return the same of an array."""

    def argument_within(
        self, memory: Array, offset: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> Any:
        """Return the argument for an array in the memory of another (see `array_within`)."""

    def load(self, specialisation: Specialisation) -> LoadedKernel:
        """Return the kernel, which is compiled and loaded the first time."""


def traits_of(device: Device) -> DeviceTraits:
    """Return the current properties of a device."""
    return DeviceTraits(
        device.arch.number,
        device.multiprocessors,
        device.tensor_cores,
        device.l2_bytes,
        device.choices,
        "GEFORCE" in device.name.upper(),
    )
