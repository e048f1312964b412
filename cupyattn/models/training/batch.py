"""What a model is trained on: tokens, what each should predict, and several samples in a row."""

from __future__ import annotations

from typing import NamedTuple

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
