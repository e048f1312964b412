"""What a model is trained on: tokens, what each should predict, and several samples in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyattn.arrays import Array

IGNORED = -100
"""The label of a token that nothing is learnt from: what `cupyattn.cross_entropy` ignores."""


class Batch(NamedTuple):
    """Samples packed one behind the other, as `cupyattn.attention_varlen` takes them.

    Attributes
    ----------
    ids, labels : int32 array (total,)
        Tokens, and what each should predict; -100 carries no loss.
    positions : int32 array (total,)
        Where each token stands: every sample begins at 0.
    cu_seqlens : int32 array (samples + 1,)
        Where each sample begins, and the end of the last.
    max_seqlen : int
        The longest sample.
    """

    ids: Array
    labels: Array
    positions: Array
    cu_seqlens: Array
    max_seqlen: int


class Sample(NamedTuple):
    """One text: int32 arrays (tokens,), the labels shifted, so that they stand beside the ids."""

    ids: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[int], learnt: Sequence[bool]) -> Sample:
        """Make one of tokens and of which among them are to be predicted.

        Examples
        --------
        >>> Sample.of([5, 6, 7], [False, False, True]).labels.tolist()
        [-100, 7, -100]
        """
        tokens = np.asarray(ids, np.int32)
        wanted = np.where(np.asarray(learnt, bool), tokens, np.int32(IGNORED))
        return cls(tokens, np.append(wanted[1:], np.int32(IGNORED)).astype(np.int32))

    @property
    def num_labels(self) -> int:
        """How many tokens are to be predicted."""
        return int(np.count_nonzero(self.labels != IGNORED))


def packed(samples: Sequence[Sample]) -> Batch:
    """Put samples one behind the other, in NumPy arrays.

    Examples
    --------
    >>> batch = packed([Sample.of([1, 2], [True] * 2), Sample.of([3, 4, 5], [True] * 3)])
    >>> batch.cu_seqlens.tolist(), batch.positions.tolist(), batch.max_seqlen
    ([0, 2, 5], [0, 1, 0, 1, 2], 3)
    """
    lengths = [len(sample.ids) for sample in samples]
    return Batch(
        np.concatenate([sample.ids for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        np.cumsum([0, *lengths], dtype=np.int32),
        max(lengths),
    )


def moved(batch: Batch, xp: Any) -> Batch:
    """Return the batch in arrays of another library, on the current device."""
    ids, labels, positions, cu_seqlens = (xp.asarray(array) for array in batch[:4])
    return Batch(ids, labels, positions, cu_seqlens, batch.max_seqlen)
