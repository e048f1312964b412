"""A device: where arrays are allocated and kernels loaded and started.

Operations above this package see these protocols alone, so that whatever executes kernels can stand
behind them: a GPU through CuPy (`CudaDevice`), or the emulator (`EmulatedDevice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cupyattn.runtime.arch import Arch
from cupyattn.runtime.arrays import Operands
from cupyattn.runtime.card import Card
from cupyattn.runtime.spec import Specialisation
from cupyattn.runtime.tuning import Choices


class Kernel(Protocol):
    """A loaded kernel, ready to start on one device."""

    specialisation: Specialisation

    def start(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], values: tuple[Any, ...]
    ) -> None:
        """Start it on the current stream; `values` are coerced already (see `launch`).

        `arguments` are the device's for arrays, its `null` for those that are absent. The values
        of a plan are the same tuple in each call.
        """


class Device(Protocol):
    """What executes kernels."""

    arch: Arch
    """The architecture that kernels are compiled for here."""
    multiprocessors: int
    """How many there are: what kernels that walk over their work choose their CTAs by."""
    l2_bytes: int
    """The size of the cache that they share."""
    choices: Choices
    """Rows of the tables that calls take in place of the usual ones."""

    null: Any
    """What kernels here are passed for an array that is absent."""

    @property
    def card(self) -> Card:
        """All of these as plans see them: a key for caches, as they are now."""

    @property
    def tensor_cores(self) -> bool:
        """Whether it has any that are worth using: which kernels float16 takes."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an uninitialised C-contiguous array."""

    def zero(self, array: Any) -> None:
        """Fill an array of this device with zeros, on the current stream."""

    def arguments(self, operands: Operands[Any]) -> list[Any]:
        """Return what kernels here are passed for the arrays of a call, in a new list.

        A GPU's kernels get addresses, which have been asked for already; the emulator has to know
        where arrays end, so its kernels get the arrays themselves.
        """

    def argument(self, array: Any) -> Any:
        """Return the same of an array."""

    def argument_within(
        self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> Any:
        """Return the same of an array in the memory of another (see `array_within`)."""

    def load(self, specialisation: Specialisation) -> Kernel:
        """Return the kernel, compiled and loaded the first time it is asked for."""


def card_of(device: Device) -> Card:
    """Describe a device as it is now."""
    return Card(
        device.arch.number,
        device.multiprocessors,
        device.tensor_cores,
        device.l2_bytes,
        device.choices,
    )
