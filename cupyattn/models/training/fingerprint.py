"""What tells the weights of a model from those of another of its shape."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from cupyattn.arrays import Array
from cupyattn.models.weights import Weights, named_arrays

_ITEMS = 64
"""Of each array: a model that was trained further differs in all of its arrays."""


def fingerprint(weights: Weights) -> str:
    """Return a number, in hexadecimal, of some items of each array, evenly apart.

    Examples
    --------
    >>> from cupyattn import models
    >>> tiny = models.PRESETS["gpt2"]._replace(num_layers=1, vocab_size=99)
    >>> one, same, other = (models.random(tiny, seed=seed, xp=np) for seed in (1, 1, 2))
    >>> fingerprint(one.weights) == fingerprint(same.weights) != fingerprint(other.weights)
    True
    """
    found = sha256()
    for name, array in named_arrays(weights):
        found.update(name.encode())
        found.update(_on_host(_some(array)).tobytes())
    return found.hexdigest()[:16]


def _some(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat[:: max(flat.size // _ITEMS, 1)]


def _on_host(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.get())
