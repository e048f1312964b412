"""Many arrays as views of one, so that what is done to all of them is one launch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array

ALIGNMENT = 256
"""Items: a block of an 8-bit state is one array's alone."""


class Flat(NamedTuple):
    """One float32 array, and where in it others lie.

    Matrices come first: what weight decay is for, norms and biases behind them are not.
    Between two arrays there are zeros, which stay zeros in every step.

    Attributes
    ----------
    array : float32 array (items,)
        All of them.
    views : dict of float32 arrays
        Each in its own shape.
    matrices : int
        Items of those with two axes or more.
    """

    array: Array
    views: dict[str, Array]
    matrices: int

    @property
    def parts(self) -> tuple[tuple[slice, bool], ...]:
        """The parts that are not empty, each with whether weight decay applies to it."""
        parts = slice(0, self.matrices), slice(self.matrices, self.array.size)
        both = zip(parts, (True, False), strict=True)
        return tuple((part, decays) for part, decays in both if part.start < part.stop)


def zeros(shapes: dict[str, tuple[int, ...]], xp: Any) -> Flat:
    """Make arrays of those shapes.

    Examples
    --------
    >>> flat = zeros({"bias": (3,), "weight": (2, 300)}, np)
    >>> flat.array.size, flat.matrices, flat.views["weight"].shape
    (1024, 768, (2, 300))
    """
    ordered = sorted(shapes, key=lambda name: len(shapes[name]) < 2)
    places, end, matrices = {}, 0, 0
    for name in ordered:
        places[name] = end
        end += -(-math.prod(shapes[name]) // ALIGNMENT) * ALIGNMENT
        matrices = end if len(shapes[name]) > 1 else matrices
    array = xp.zeros(end, np.float32)
    views = {
        name: array[places[name] : places[name] + math.prod(shape)].reshape(shape)
        for name, shape in shapes.items()
    }
    return Flat(array, views, matrices)


def flatten(arrays: dict[str, Array], xp: Any) -> Flat:
    """Copy arrays into one, and put its views in their place in the dict."""
    flat = zeros({name: array.shape for name, array in arrays.items()}, xp)
    for name, view in flat.views.items():
        view[...] = arrays[name]
        arrays[name] = view
    return flat
