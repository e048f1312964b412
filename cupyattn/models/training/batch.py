"""Training data: tokens, the token that each should predict, and several samples in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyattn.runtime.arrays import Array
from cupyattn.runtime.errors import error

_LARGEST = np.iinfo(np.int32).max
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

        Raises
        ------
        TypeError, ValueError
            For ids that are no row of integers of 0 or more, or not as many flags.

        Examples
        --------
        >>> Sample.of([5, 6, 7], [False, False, True]).labels.tolist()
        [-100, 7, -100]
        """
        given, flags = np.asarray(ids), np.asarray(learnt, bool)
        if given.size and given.dtype.kind not in "iu":
            raise _no_sample(TypeError, f"ids of {given.dtype}")
        if given.ndim != 1 or flags.shape != given.shape:
            raise _no_sample(
                ValueError, f"ids of shape {given.shape} and learnt of shape {flags.shape}"
            )
        if given.size and not 0 <= given.min() <= given.max() <= _LARGEST:
            raise _no_sample(ValueError, f"ids from {given.min()} to {given.max()}")
        tokens = given.astype(np.int32)
        wanted = np.where(flags, tokens, np.int32(IGNORED))
        return cls(tokens, np.append(wanted[1:], np.int32(IGNORED)).astype(np.int32))

    @property
    def num_labels(self) -> int:
        """How many tokens are to be predicted."""
        return int(np.count_nonzero(self.labels != IGNORED))


def _no_sample(kind: type[Exception], passed: str) -> Exception:
    return error(
        kind,
        passed,
        f"a sample is a row of token ids, integers of 0 to {_LARGEST}, and a flag for each",
        "pass for example Sample.of(tokenizer.encode(text), [True] * len(ids))",
    )


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
