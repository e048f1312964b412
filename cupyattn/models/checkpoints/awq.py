"""AWQ's files (Lin et al., arXiv:2306.00978), as AutoAWQ writes them for its gemm kernels.

qweight is (K, N / 8) and qzeros (K / group, N / 8), each with eight n in a word: 0, 2, 4, 6, 1, 3,
5, 7 from the lowest bits on. scales are (K / group, N).
"""

from __future__ import annotations

import numpy as np

from cupyattn.models.checkpoints.int4_groups import (
    PER_WORD,
    Groups,
    group_tensor,
    groups_of,
    integers_of,
    words_around,
)
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.models.checkpoints.tensors import AnyTensor, QuantisedTensor

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has each n."""


def unpacked_awq(stored: dict[str, Stored], group_size: int | None) -> dict[str, AnyTensor]:
    """Return what a model takes of the tensors of its files.

    Raises
    ------
    NotImplementedError
        For groups that are no whole ones.
    ValueError
        For parts that are missing or do not fit together.
    """
    rest = dict(stored)
    found: dict[str, AnyTensor] = {
        name: _tensor(groups, group_size) for name, groups in groups_of(rest)
    }
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _tensor(groups: Groups, group_size: int | None) -> QuantisedTensor:
    inner, words = groups.qweight.shape if len(groups.qweight.shape) == 2 else (0, 0)

    def read_codes(start: int, stop: int) -> np.ndarray:
        by_row = np.ascontiguousarray(_columns(groups.qweight, start, stop).T)
        return by_row[:, ::2] | by_row[:, 1::2] << 4

    def read_zeros(start: int, stop: int) -> np.ndarray:
        return _columns(groups.qzeros, start, stop)

    return group_tensor(groups, words * PER_WORD, inner, group_size, read_codes, read_zeros)


def _columns(packed: Stored, start: int, stop: int) -> np.ndarray:
    """Return the integers (rows, columns) of some n, in their order."""
    columns, own = words_around(start, stop)
    stored = integers_of(packed.items((slice(None), columns)))
    in_order = stored.reshape(len(stored), -1, PER_WORD)[..., _PLACES]
    return in_order.reshape(len(stored), -1)[:, own]
