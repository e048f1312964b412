"""Embedding and the gradient of its table in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from cupyattn.runtime.precision import Float64


def embedding(table: ArrayLike, ids: ArrayLike) -> Float64:
    """Return the rows of a table by their numbers.

    Examples
    --------
    >>> embedding([[1.0, 2.0], [3.0, 4.0]], [1, 1, 0])
    array([[3., 4.],
           [3., 4.],
           [1., 2.]])
    """
    return np.asarray(np.asarray(table)[np.asarray(ids)], dtype=np.float64)


def embedding_backward(dout: ArrayLike, rows: int, ids: ArrayLike) -> Float64:
    """Return the gradient of a table of `rows` rows: each is the sum of dout where ids has it.

    Examples
    --------
    >>> embedding_backward([[1.0], [2.0], [4.0]], 3, [2, 0, 2])
    array([[2.],
           [0.],
           [5.]])
    """
    ids, dout = np.asarray(ids), np.asarray(dout, dtype=np.float64)
    dtable = np.zeros((rows, dout.shape[-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        np.add.at(dtable, ids, dout)
    return dtable
