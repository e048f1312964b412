"""What devices without a GPU have in common: their kernels get the arrays themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.arrays import Operands, array_within
from cupyattn.kernels.card import Card
from cupyattn.kernels.device import Device, card_of


class SimulatedDevice:
    """The part of a `Device` that hands arrays to kernels, which know their ends so."""

    null = None

    @property
    def card(self: Device) -> Card:
        """What plans depend on."""
        return card_of(self)

    def arguments(self, operands: Operands) -> dict[str, Any]:
        """Return the arrays of a call by name."""
        return {**operands.arrays}

    def argument(self, array: Any) -> Any:
        """Return the array."""
        return array

    def argument_within(
        self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> Any:
        """Return an array in the memory of another."""
        return array_within(memory, offset, shape, dtype)
