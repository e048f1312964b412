"""The loss of hidden states: the head and its cross-entropy, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyattn import cross_entropy
from cupyattn.models.weights import Product
from cupyattn.runtime.arrays import Array

LOGITS_BYTES = 2**27
"""The most memory of logits: 512 rows of a vocabulary of 128,256 in float16."""
_ROWS_TOGETHER = 128  # whole tiles of the products


def loss_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of losses, and of gradients that are added up: float32, or float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def rows_at_once(columns: int, itemsize: int) -> int:
    """Return how many rows of logits are computed at a time."""
    rows = max(LOGITS_BYTES // (columns * itemsize), 1)
    return rows - rows % _ROWS_TOGETHER if rows > _ROWS_TOGETHER else rows


def logit_chunks(head: Product, hidden: Array, xp: Any) -> Iterator[tuple[slice, Array]]:
    """Yield the logits of hidden states (rows, E), and whose rows they are.

    Each chunk is written over the one before. `cupyattn.linear_cross_entropy` does the same; a head
    with a bias, or one that is not trained and needs no gradient, is not within its reach.
    """
    columns = len(head.weight)
    step = min(rows_at_once(columns, hidden.dtype.itemsize), len(hidden))
    logits = xp.empty((step, columns), hidden.dtype)
    for start in range(0, len(hidden), step or 1):
        rows = slice(start, min(start + step, len(hidden)))
        yield rows, head(hidden[rows], out=logits[: rows.stop - start])


def mean_loss(head: Product, hidden: Array, labels: Array, xp: Any) -> Array:
    """Return the mean loss of the rows whose label is not -100, NaN if there are none."""
    total = xp.zeros((), loss_dtype(hidden.dtype))
    for rows, logits in logit_chunks(head, hidden, xp):
        total += cross_entropy(logits, labels[rows], reduction="sum")
    with np.errstate(invalid="ignore"):
        return total / xp.asarray(labels != -100).sum(dtype=total.dtype)
