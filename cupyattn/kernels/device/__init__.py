"""A device: where arrays are allocated and kernels loaded and started.

Operations above this package see these protocols alone, so that whatever executes kernels can stand
behind them: a GPU through CuPy (`cuda_device`), or the emulator (`emulated_device`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cupyattn.kernels.arch import Arch
from cupyattn.kernels.card import Card
from cupyattn.kernels.choices import Choices
from cupyattn.kernels.spec import Specialisation


class Kernel(Protocol):
    """A loaded kernel, ready to start on one device."""

    specialisation: Specialisation

    def start(
        self, grid: tuple[int, int, int], arrays: Sequence[Any], values: tuple[Any, ...]
    ) -> None:
        """Start it on the current stream; `values` are coerced already (see `launch`).

        The values of a plan are the same tuple in each call.
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

    def load(self, specialisation: Specialisation) -> Kernel:
        """Return the kernel, compiled and loaded the first time it is asked for."""
