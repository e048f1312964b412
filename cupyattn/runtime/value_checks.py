"""Checks of the values in arrays, in addition to shapes and dtypes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import cast

import numpy as np

from cupyattn.runtime.arrays import Array, CudaArray, Operands
from cupyattn.runtime.errors import error

on_gpu: ContextVar[bool] = ContextVar("cupyattn_value_checks_on_gpu", default=False)
"""Whether values are checked on a GPU too; set by `backend`."""


def checks_values(operands: Operands) -> bool:
    """Tell whether to check values: always on the CPU, on a GPU only if `on_gpu`, because it waits.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.runtime.arrays import adopt
    >>> from cupyattn.runtime.records import record_of
    >>> checks_values(adopt(record_of("x")(np.zeros(3))))
    True
    """
    return operands.device_id is None or on_gpu.get()


def require_within(name: str, numbers: Array, count: int, allowed: str, fix: str) -> None:
    """Raise ValueError for the first number of an array that is not 0 to count - 1.

    For an array on a GPU this waits. `allowed` is the beginning of the error's second part.
    """
    outside = (numbers < 0) | (numbers >= count)
    if not bool(outside.any()):
        return
    at = np.unravel_index(int(outside.argmax()), numbers.shape)
    index = ", ".join(str(int(i)) for i in at)
    raise error(
        ValueError,
        f"{name}[{index}] is {int(numbers[tuple(at)])}",
        f"{allowed} rows 0 to {count - 1}" if count else f"{allowed} no rows",
        fix,
    )


def on_host(array: Array) -> np.ndarray:
    """Return an array's items in NumPy; for an array on a GPU this waits."""
    return array if isinstance(array, np.ndarray) else cast(CudaArray, array).get()
