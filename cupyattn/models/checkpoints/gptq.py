"""GPTQ's files (Frantar et al., arXiv:2210.17323, as AutoGPTQ and GPTQModel write them).

qweight is (K / 8, N) with eight k in a word, qzeros (K / group, N / 8) with eight n, scales
(K / group, N). The first version of the format, which is still the one mostly written, stores zeros
less one, where 15 stands for 0. g_idx has the group of each k; with "act-order" groups are
scattered over K, and there is no code for that.
"""

from __future__ import annotations

import numpy as np

from cupyattn.models.checkpoints.contents import damaged
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
from cupyattn.runtime.errors import error


def unpacked_gptq(
    stored: dict[str, Stored], group_size: int | None, *, zeros_less_one: bool, in_order: bool
) -> dict[str, AnyTensor]:
    """Return what a model takes of the tensors of its files.

    `in_order` says whether groups lie along K where no g_idx says it.

    Raises
    ------
    NotImplementedError
        For groups that are scattered over K, or no whole ones.
    ValueError
        For parts that are missing or do not fit together.
    """
    rest = dict(stored)
    found: dict[str, AnyTensor] = {}
    for name, groups in groups_of(rest):
        found[name] = _tensor(groups, group_size, zeros_less_one)
        order = rest.pop(f"{name.removesuffix('.weight')}.g_idx", None)
        if order is None and not in_order:
            raise damaged(groups.qweight.what, "desc_act is true, and it has no g_idx")
        if order is not None:
            _require_in_order(order, found[name].shape[1], group_size)
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _tensor(groups: Groups, group_size: int | None, zeros_less_one: bool) -> QuantisedTensor:
    words, outer = groups.qweight.shape if len(groups.qweight.shape) == 2 else (0, 0)
    inner = words * PER_WORD

    def read_codes(start: int, stop: int) -> np.ndarray:
        """Take the bytes of words as they are: they hold two k, the even one low."""
        columns = groups.qweight.items((slice(None), slice(start, stop)))
        by_row = columns.T.astype("<i4", order="C")
        return by_row.view(np.uint8).reshape(stop - start, inner // 2)

    def read_zeros(start: int, stop: int) -> np.ndarray:
        columns, own = words_around(start, stop)
        zeros = integers_of(groups.qzeros.items((slice(None), columns)))[:, own]
        return (zeros + 1) & 15 if zeros_less_one else zeros

    return group_tensor(groups, outer, inner, group_size, read_codes, read_zeros)


def _require_in_order(order: Stored, inner: int, group_size: int | None) -> None:
    order.require(("I32", "I64"), (inner,))
    if not np.array_equal(order.items(slice(None)), np.arange(inner) // (group_size or inner)):
        raise error(
            NotImplementedError,
            f"{order.what}: groups are scattered over K (desc_act, act-order)",
            "GPTQ's files are read whose groups are neighbours along K",
            "take a file that was quantised with desc_act=False, or the model as it was before",
        )
