"""Error bound of the kernel of the gradient of embedding."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cupyattn.ops.embedding.reference import embedding_backward
from cupyattn.runtime.precision import TINY32, U32, Float64, precision_of


def embedding_backward_bound(
    dout: ArrayLike, rows: int, ids: ArrayLike, *, dtype: DTypeLike, present: ArrayLike = 0.0
) -> Float64:
    """Return the error bound of `embedding_backward`; the gradient is added to `present`.

    A row of n tokens is a sum of n + 1 terms in some order. Each addition is rounded once, so the
    error is at most n u32 times the sum of the terms' magnitudes.
    """
    ids, present = np.asarray(ids), np.asarray(present, dtype=np.float64)
    count = np.bincount(ids.reshape(-1), minlength=rows)[:, None]
    sizes = embedding_backward(np.abs(np.asarray(dout, np.float64)), rows, ids) + np.abs(present)
    error = count * (U32 * sizes + TINY32)
    exact = embedding_backward(dout, rows, ids) + present
    return error + precision_of(dtype).store(np.abs(exact) + error)
