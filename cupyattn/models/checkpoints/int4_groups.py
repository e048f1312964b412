"""Four-bit weights of GPTQ and AWQ files: groups of integers with a scale and a zero each.

A weight ``NAME.weight`` (N, K) is three tensors: ``NAME.qweight``, ``NAME.qzeros`` and
``NAME.scales``. A word of int32 holds eight integers, the first in the lowest bits.

GPTQ (Frantar et al., arXiv:2210.17323, as AutoGPTQ and GPTQModel write it): qweight is (K / 8, N)
with eight k in a word, qzeros (K / group, N / 8) with eight n, scales (K / group, N). The first
version of the format, which most files have, stores zeros less one, where 15 means 0. g_idx has the
group of each k. With "act-order" the groups are scattered over K, which is not supported.

AWQ (Lin et al., arXiv:2306.00978, as AutoAWQ writes it for its gemm kernels): qweight is (K, N / 8)
and qzeros (K / group, N / 8), each with eight n in a word: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
bits on. scales are (K / group, N).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import AnyTensor, QuantisedTensor, damaged
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.ops.linear.weight_formats import FORMATS, Blocks, blocks_for
from cupyattn.runtime.errors import error

PER_WORD = 8
_SCALES = ("F16", "BF16", "F32")


class Groups(NamedTuple):
    """The three tensors of a weight, as they are in the file."""

    qweight: Stored
    qzeros: Stored
    scales: Stored


def groups_of(stored: dict[str, Stored]) -> Iterator[tuple[str, Groups]]:
    """Take the parts of each weight out of a dict, with the name that it would have."""
    for packed_name in [name for name in stored if name.endswith(".qweight")]:
        name = packed_name.removesuffix(".qweight")
        where = stored[packed_name].what
        parts = []
        for part in ("qweight", "qzeros", "scales"):
            tensor = stored.pop(f"{name}.{part}", None)
            if tensor is None:
                raise damaged(where, f"there is no {name}.{part}")
            parts.append(tensor.require(_SCALES if part == "scales" else ("I32",)))
        yield f"{name}.weight", Groups(*parts)


def group_tensor(
    groups: Groups,
    outer: int,
    inner: int,
    group_size: int | None,
    read_codes: Callable[[int, int], np.ndarray],
    read_zeros: Callable[[int, int], np.ndarray],
) -> QuantisedTensor:
    """Return the weight (N, K); a group longer than a block of int4 becomes several blocks.

    ``read_codes(start, stop)`` returns codes (rows, K / 2), and ``read_zeros`` zeros (groups,
    rows).
    """
    size = inner if group_size is None else group_size
    if inner < 1 or outer < 1 or outer % PER_WORD or inner % size or inner % 32:
        raise error(
            NotImplementedError,
            f"{groups.qweight.what}: N = {outer}, K = {inner} in groups of {size}",
            f"K must be a multiple of the group and of 32, and N of {PER_WORD}",
            "load the model from before it was quantised",
        )
    groups.scales.require(_SCALES, (inner // size, outer))
    groups.qzeros.require(("I32",), (inner // size, outer // PER_WORD))
    block_size = min(size, FORMATS["int4"].largest or size)
    if size % block_size or not FORMATS["int4"].allows(block_size, inner):
        block_size = blocks_for("int4", inner).block_size
    repeats = size // block_size

    def read(start: int, stop: int) -> QuantizedWeight:
        scales = groups.scales.items((slice(None), slice(start, stop)))
        with np.errstate(over="ignore"):
            stored = scales.astype(np.float16)
        both = stored.astype(np.float32), scales.astype(np.float32)
        if not np.array_equal(*both, equal_nan=True):
            raise error(
                NotImplementedError,
                f"{groups.scales.what}: scales that float16 does not represent",
                "scales are kept in float16",
                "load the model from before it was quantised",
            )
        pairs = np.stack([stored.T, read_zeros(start, stop).T.astype(np.float16)], axis=-1)
        return QuantizedWeight(
            "int4",
            read_codes(start, stop),
            np.ascontiguousarray(pairs.repeat(repeats, axis=1)),
            block_size=block_size,
            transposed=True,
        )

    return QuantisedTensor((outer, inner), Blocks("int4", block_size), read)


def words_around(start: int, stop: int) -> tuple[slice, slice]:
    """Return the words that hold some integers, and where these are among the words'.

    Examples
    --------
    >>> words_around(10, 17)
    (slice(1, 3, None), slice(2, 9, None))
    """
    first = start // PER_WORD
    return slice(first, -(-stop // PER_WORD)), slice(
        start - first * PER_WORD, stop - first * PER_WORD
    )


def integers_of(words: np.ndarray) -> np.ndarray:
    """Return the integers (rows, 8 W) of words (rows, W), the lowest bits first."""
    bytes_of = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    integers = np.empty((*bytes_of.shape, 2), np.uint8)
    integers[..., 0], integers[..., 1] = bytes_of & 15, bytes_of >> 4
    return integers.reshape(len(words), -1)


def unpacked_gptq(
    stored: dict[str, Stored], group_size: int | None, *, zeros_less_one: bool, in_order: bool
) -> dict[str, AnyTensor]:
    """Return the tensors of a model; `in_order`: groups without g_idx are along K."""
    rest = dict(stored)
    found: dict[str, AnyTensor] = {}
    for name, groups in groups_of(rest):
        found[name] = _gptq_tensor(groups, group_size, zeros_less_one)
        order = rest.pop(f"{name.removesuffix('.weight')}.g_idx", None)
        if order is None and not in_order:
            raise damaged(groups.qweight.what, "desc_act is true, but there is no g_idx")
        if order is not None:
            _require_in_order(order, found[name].shape[1], group_size)
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _gptq_tensor(groups: Groups, group_size: int | None, zeros_less_one: bool) -> QuantisedTensor:
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
            "the groups of GPTQ's files must be consecutive along K",
            "load a file that was quantised with desc_act=False, or the unquantised model",
        )


_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each n in a word."""


def unpacked_awq(stored: dict[str, Stored], group_size: int | None) -> dict[str, AnyTensor]:
    """Return the tensors of a model."""
    rest = dict(stored)
    found: dict[str, AnyTensor] = {
        name: _awq_tensor(groups, group_size) for name, groups in groups_of(rest)
    }
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _awq_tensor(groups: Groups, group_size: int | None) -> QuantisedTensor:
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
