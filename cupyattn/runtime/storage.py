"""The storage dtypes of kernels. Their names are NumPy's and those of the CUDA sources."""

from __future__ import annotations

from cupyattn.runtime.arrays import ALIGNMENT

STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an item by the name of the dtype."""

VECTOR_BYTES = ALIGNMENT
"""The widest load or store of one thread (kVectorBytes in config.cuh)."""


def vector_items(dtype: str) -> int:
    """Return how many items one vector load has."""
    return VECTOR_BYTES // STORAGE[dtype]
