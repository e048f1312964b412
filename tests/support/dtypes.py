"""The dtypes that the tests go through: the list stands here only."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = ("float16", "bfloat16", "float32")
FLOAT_DTYPES = ("float32", "bfloat16")
"""Those that have no products on Turing's tensor cores, and hence kernels of their own."""


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
