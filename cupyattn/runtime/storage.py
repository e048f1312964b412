"""The storage dtypes of kernels, by their NumPy names, which the CUDA sources use too."""

from __future__ import annotations

from cupyattn.runtime.arrays import ALIGNMENT

STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Name and bytes of an item."""

VECTOR_BYTES = ALIGNMENT
"""The widest load or store of one thread (kVectorBytes in config.cuh)."""


def vector_items(dtype: str) -> int:
    """Return how many items one vector load brings."""
    return VECTOR_BYTES // STORAGE[dtype]
