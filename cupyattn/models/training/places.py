"""Where what is learnt stands in a model, which is where its gradients are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyattn import embedding_backward
from cupyattn.runtime.arrays import Array


class Place(NamedTuple):
    """A part of one of the model's arrays: ``array[part] = scale * learnt``.

    Attributes
    ----------
    array : array
        In the model's dtype, the very one that its layers hold.
    part : tuple of slices
        Of the shape of what is learnt.
    scale : float
    """

    array: Array
    part: tuple[slice, ...]
    scale: float = 1.0

    def fill(self, learnt: Array) -> None:
        """Write what was learnt there, rounded to the model's dtype."""
        with np.errstate(over="ignore"):
            scaled = learnt if self.scale == 1 else self.scale * learnt
            self.array[self.part] = scaled.astype(self.array.dtype, copy=False)


class Gradients:
    """Takes the gradients of a model's arrays, and adds them to those of what is learnt.

    Each is rounded to the model's dtype once, as a product leaves it, and added in float32. An
    array without a place is not trained, and is passed over.

    Parameters
    ----------
    places : mapping from str to Place
        Of what is learnt by name.
    learnt, into : mapping from str to array
        It, and where its gradients are added.
    accumulate : bool
        Whether to add to what stands there.
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        learnt: Mapping[str, Array],
        into: Mapping[str, Array],
        accumulate: bool,
    ) -> None:
        self._parts: dict[int, list[tuple[Place, Array, Array]]] = {}
        for name, place in places.items():
            if not accumulate:
                into[name].fill(0)
            one = place, learnt[name], into[name]
            self._parts.setdefault(id(place.array), []).append(one)

    def wants(self, array: Any) -> bool:
        """Tell whether an array of the model is trained."""
        return id(array) in self._parts

    def add(self, array: Any, gradient: Array) -> None:
        """Take the gradient of one of the model's arrays: d array = scale * d learnt there."""
        for place, _, into in self._parts.get(id(array), ()):
            found = gradient[place.part]
            if place.scale != 1 or found.dtype.kind != "f":  # bfloat16 is of a kind of its own
                found = place.scale * found.astype(into.dtype)
            into += found

    def add_rows(self, table: Array, ids: Array, gradient: Array) -> None:
        """Take the gradient of ``embedding(table, ids)``, and add each row to its id's."""
        for _, learnt, into in self._parts.get(id(table), ()):
            dout = gradient.astype(into.dtype, copy=False)
            embedding_backward(dout, learnt, ids, grads=into, accumulate=True)
