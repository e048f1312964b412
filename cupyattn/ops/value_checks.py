"""Whether a call looks at the values in its arrays, beside their shapes and dtypes."""

from __future__ import annotations

from contextvars import ContextVar

import numpy as np

from cupyattn.arrays import Array, Operands

on_gpu: ContextVar[bool] = ContextVar("cupyattn_value_checks_on_gpu", default=False)
"""Set by `backend`."""


def checks_values(operands: Operands) -> bool:
    """Tell whether to: always, but on a GPU only where asked, for it has to be waited for.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn.arrays import adopt
    >>> checks_values(adopt({"x": np.zeros(3)}))
    True
    """
    return operands.device_id is None or on_gpu.get()


def on_host(array: Array) -> np.ndarray:
    """Return an array's items in NumPy; those on a GPU are waited for."""
    return array if isinstance(array, np.ndarray) else array.get()
