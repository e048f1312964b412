"""Registers of fewer axes, or of extent 1, spread over all lanes of a batch."""

from typing import Any

import numpy as np

__all__ = ["over_lanes"]

Array = Any


def over_lanes(value: Array, shape: tuple[int, int]) -> Array:
    """Return `value` with one element per lane: itself, or a read-only view.

    Most values have that shape already, and `numpy.broadcast_to` costs 2 µs even then: as much as
    half a dozen operations on the lanes of a small launch.
    """
    return value if value.shape == shape else np.broadcast_to(value, shape)
