"""The storage dtypes of kernels. Their names are NumPy's and those of the CUDA sources."""

from __future__ import annotations

from collections.abc import Iterable

from cupyattn.runtime.arrays import ALIGNMENT, Layout

STORAGE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of an item by the name of the dtype."""

VECTOR_BYTES = ALIGNMENT
"""The widest load or store of one thread (kVectorBytes in config.cuh)."""


def vector_items(dtype: str) -> int:
    """Return how many items one vector load has."""
    return VECTOR_BYTES // STORAGE[dtype]


def rows_aligned(
    arrays: Iterable[tuple[Layout | None, int | None]], unit: int = VECTOR_BYTES
) -> bool:
    """Tell whether every row of the arrays that are present starts at a multiple of `unit` bytes.

    Each array comes with the number of bytes by which it starts after a multiple of 16.
    """
    return all(
        layout is None
        or not any(
            place % unit
            for place, extent in zip(
                (start or 0, *layout.strides[:-1]), (2, *layout.shape[:-1]), strict=True
            )
            if extent > 1
        )
        for layout, start in arrays
    )
