"""The option `dtype`: the floating-point dtype of a result."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.runtime.arrays import dtype_of
from cupyattn.runtime.checks import CPU_FLOATS
from cupyattn.runtime.errors import error, shown


def float_dtype(given: Any) -> np.dtype:
    """Return a floating-point dtype that is given as a dtype, a name or a scalar type.

    Raises
    ------
    TypeError
        For anything else.
    """
    try:
        dtype = dtype_of(given) if isinstance(given, str) else np.dtype(given)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name not in CPU_FLOATS:
        raise error(
            TypeError,
            f"dtype = {shown(given)}",
            f"allowed are {', '.join(CPU_FLOATS)}",
            "pass one of them, 'float32' most often",
        )
    return dtype
