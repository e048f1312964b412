"""From the reference's float64 to the dtype of a result."""

from __future__ import annotations

import numpy as np

from cupyattn.arrays import Array


def round_into(given: Array | None, exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round once, into the array given or a new one. Too large for the dtype becomes inf."""
    target = np.empty(exact.shape, dtype) if given is None else given
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        target[...] = exact.astype(dtype)
    return target
