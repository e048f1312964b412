"""Where a model is, and in which numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn import device_info
from cupyattn.runtime.cupy_library import load_cupy
from cupyattn.runtime.errors import error, shown

DTYPES = ("float16", "float32", "bfloat16")


def model_library(given: Any) -> Any:
    """Return numpy or cupy; for None cupy where there is a GPU that kernels run on.

    Raises
    ------
    TypeError
        For anything else.
    """
    if given is None:
        usable = any(each["unusable_because"] is None for each in device_info()["devices"])
        return load_cupy() if usable else np
    if getattr(given, "__name__", None) in ("numpy", "cupy"):
        return given
    raise error(
        TypeError,
        f"got xp = {shown(given)}",
        "it is the module numpy, the module cupy, or None for cupy where there is a GPU",
        "import cupy, and pass xp=cupy for a model on the GPU",
    )


def model_dtype(given: Any, xp: Any) -> str:
    """Return the name of a model's dtype; for None what its device computes fastest.

    Raises
    ------
    TypeError
        For one that models are not kept in.
    """
    if given is None:
        return "float32" if xp is np else "float16"
    name = given
    if not isinstance(given, str):
        try:
            name = np.dtype(given).name
        except TypeError:
            name = None
    if name in DTYPES:
        return name
    raise error(
        TypeError,
        f"got dtype = {shown(given)}",
        f"a model is kept in {', '.join(map(repr, DTYPES))}",
        "pass one of these; None is 'float16' on a GPU and 'float32' for NumPy arrays",
    )
