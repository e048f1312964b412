"""Weights of GPTQ, AWQ and compressed-tensors: groups of integers with a scale and a zero each.

A weight ``NAME.weight`` (N, K) of GPTQ and AWQ is three tensors: ``NAME.qweight``, ``NAME.qzeros``
and ``NAME.scales``. A word of int32 holds eight integers of four bits or four of eight bits, the
first in the lowest bits. A number is (integer - zero) scale.

GPTQ (Frantar et al., arXiv:2210.17323, as AutoGPTQ and GPTQModel write it): qweight is (K / P, N)
with P integers along K in a word, qzeros (K / group, N / P) with P along N, scales (K / group, N).
The first version of the format, which most files have, stores zeros less one, modulo the number of
integers. g_idx has the group of each k. With "act-order" (desc_act) groups are scattered over K.

AWQ (Lin et al., arXiv:2306.00978, as AutoAWQ writes it for its gemm kernels): qweight is (K, N / 8)
and qzeros (K / group, N / 8), each with eight n in a word: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest
bits on. scales are (K / group, N).

Four bits become "int4". Eight bits become "int8", which has no zeros, if all zeros are 128. The
other weights, and those whose groups are scattered, are floats, or rounded to "int8".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import AnyTensor, QuantisedTensor, damaged, rounded
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.ops.linear.weight_formats import FORMATS, UNIT, Blocks, blocks_for
from cupyattn.runtime.errors import error
from cupyattn.runtime.folders import users_level

SCALES = ("F16", "BF16", "F32")
_WORD = 32  # bits
_SMALLEST_NORMAL = 2.0**-14  # of float16

Rows = Callable[[int, int], np.ndarray]
"""``rows(start, stop)`` returns something of these rows of a weight."""


class Integers(NamedTuple):
    """A weight (N, K) of unsigned integers, in groups that share a scale and a zero.

    Attributes
    ----------
    what : str
        The file and the tensor, for errors.
    shape : tuple of int
        (N, K).
    bits : int
        4 or 8.
    size : int
        Weights of a group: a power of two from 32 on, or K.
    codes : callable
        Rows of integers: (rows, K / 2) with the even k in the low half, or (rows, K).
    scales, zeros : callable
        (rows, groups), floats of any size and integers.
    narrow : bool
        Whether scales are float16 in the file.
    group_of : integer array (K,), or None
        The group of each k; None if groups are consecutive.
    """

    what: str
    shape: tuple[int, int]
    bits: int
    size: int
    codes: Rows
    scales: Rows
    zeros: Rows
    narrow: bool
    group_of: np.ndarray | None = None

    @property
    def groups(self) -> np.ndarray:
        """The group of each k."""
        return np.arange(self.shape[1]) // self.size if self.group_of is None else self.group_of


def tensor_of(given: Integers) -> AnyTensor:
    """Return the weight in a format that has its numbers, or else rounded to "int8"."""
    outer, inner = given.shape
    floats = partial(_floats, given)
    size = _block_size(given)
    if size is None:
        return rounded(given.shape, floats, "act-order, whose groups are scattered over K,")
    if given.bits == 8:
        if (given.zeros(0, outer) != 128).any():
            return rounded(given.shape, floats, "eight bits with zero points")
        return QuantisedTensor(given.shape, Blocks("int8", size), partial(_int8_rows, given, size))
    fits = given.narrow or _fits_float16(given.scales(0, outer))
    if fits is None:  # integers less zeros are at most 15, and int8 has scales of float32
        return QuantisedTensor(given.shape, Blocks("int8", size), partial(_int8_rows, given, size))
    size = _int4_size(size, inner)
    kept = QuantisedTensor(given.shape, Blocks("int4", size), partial(_int4_rows, given, size))
    if fits:
        return kept
    return kept._replace(
        floats=floats, rounding="float32 scales to float16, within 2^-11 of a weight"
    )


def _block_size(given: Integers) -> int | None:
    """Return the size of blocks within whole groups, or None if groups are scattered."""
    if given.group_of is None:
        return given.size
    for size in (128, 64, UNIT):
        if given.shape[1] % size == 0:
            blocks = given.group_of.reshape(-1, size)
            if (blocks == blocks[:, :1]).all():
                return size
    return None


def _int4_size(size: int, inner: int) -> int:
    """Return the size of int4's blocks in groups of `size`: a longer group is several blocks."""
    largest = min(size, FORMATS["int4"].largest or size)
    if size % largest or not FORMATS["int4"].allows(largest, inner):
        return blocks_for("int4", inner).block_size
    return largest


def _fits_float16(scales: np.ndarray) -> bool | None:
    """Tell whether float16 has the scales; None if it is not even near all of them."""
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        near = wide.astype(np.float16).astype(np.float32)
    other = (near != wide) & ~np.isnan(wide)
    if not other.any():
        return True
    normal = np.isfinite(near[other]) & (np.abs(wide[other]) >= _SMALLEST_NORMAL)
    return False if normal.all() else None


def _int4_rows(given: Integers, size: int, start: int, stop: int) -> QuantizedWeight:
    scales, zeros = _of_blocks(given, size, start, stop)
    pairs = np.empty((*zeros.shape, 2), np.float16)
    pairs[..., 0], pairs[..., 1] = scales, zeros
    codes = np.ascontiguousarray(given.codes(start, stop))
    return QuantizedWeight("int4", codes, pairs, block_size=size, transposed=True)


def _int8_rows(given: Integers, size: int, start: int, stop: int) -> QuantizedWeight:
    scales, zeros = _of_blocks(given, size, start, stop)
    integers = _unpacked(given, start, stop).reshape(*zeros.shape, size)
    codes = integers.astype(np.int16) - zeros[..., None].astype(np.int16)
    codes = codes.astype(np.int8, order="C")
    scales = np.ascontiguousarray(scales.astype(np.float32))
    return QuantizedWeight(
        "int8", codes.reshape(stop - start, -1), scales, block_size=size, transposed=True
    )


def _of_blocks(given: Integers, size: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and the zeros (rows, blocks) of blocks."""
    groups = given.groups[::size]
    return given.scales(start, stop)[:, groups], given.zeros(start, stop)[:, groups]


def _floats(given: Integers, start: int, stop: int) -> np.ndarray:
    groups = given.groups
    zeros = given.zeros(start, stop).astype(np.float32)
    scales = given.scales(start, stop).astype(np.float32)
    weights = _unpacked(given, start, stop).astype(np.float32)
    weights -= zeros.take(groups, axis=1, mode="clip")
    weights *= scales.take(groups, axis=1, mode="clip")
    return weights


def _unpacked(given: Integers, start: int, stop: int) -> np.ndarray:
    codes = given.codes(start, stop)
    return codes if given.bits == 8 else _halves(codes)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the integers (rows, 2 W) of bytes (rows, W), the low half first."""
    integers = np.empty((*packed.shape, 2), np.uint8)
    integers[..., 0], integers[..., 1] = packed & 15, packed >> 4
    return integers.reshape(len(packed), -1)


def words_around(start: int, stop: int, per_word: int) -> tuple[slice, slice]:
    """Return the words that hold some integers, and where these are among the words'.

    Examples
    --------
    >>> words_around(10, 17, 8)
    (slice(1, 3, None), slice(2, 9, None))
    """
    first = start // per_word
    return slice(first, -(-stop // per_word)), slice(
        start - first * per_word, stop - first * per_word
    )


def bytes_of(words: np.ndarray) -> np.ndarray:
    """Return the bytes (rows, 4 W) of words (rows, W), the lowest first."""
    rows = np.array(words, "<i4", order="C")  # a copy, which is aligned, as files may not be
    return rows.view(np.uint8).reshape(len(rows), -1)


def integers_of(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the integers (rows, P W) of words (rows, W), the lowest bits first."""
    found = bytes_of(words)
    return found if bits == 8 else _halves(found)


class _Packed(NamedTuple):
    """The three tensors of a weight, as they are in the file."""

    qweight: Stored
    qzeros: Stored
    scales: Stored


def _packed(stored: dict[str, Stored]) -> Iterator[tuple[str, _Packed]]:
    """Take the parts of each weight out of a dict, with the name that it would have."""
    for packed_name in [name for name in stored if name.endswith(".qweight")]:
        name = packed_name.removesuffix(".qweight")
        where = stored[packed_name].what
        parts = []
        for part in ("qweight", "qzeros", "scales"):
            tensor = stored.pop(f"{name}.{part}", None)
            if tensor is None:
                raise damaged(where, f"there is no {name}.{part}")
            parts.append(tensor.require(SCALES if part == "scales" else ("I32",)))
        yield f"{name}.weight", _Packed(*parts)


def _integers(
    packed: _Packed,
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
    codes: Rows,
    zeros: Callable[[slice], np.ndarray],
) -> Integers:
    """Check the parts of a weight; ``zeros(words)`` returns (groups, integers in these words)."""
    outer, inner = shape
    size, per_word = group_size or inner, _WORD // bits
    if inner < 1 or outer < 1 or outer % per_word or inner % size or inner % UNIT:
        raise error(
            NotImplementedError,
            f"{packed.qweight.what}: N = {outer}, K = {inner} in groups of {size}",
            f"K must be a multiple of the group and of {UNIT}, and N of {per_word}",
            "load the model from before it was quantised",
        )
    packed.scales.require(SCALES, (inner // size, outer))
    packed.qzeros.require(("I32",), (inner // size, outer // per_word))

    def read_scales(start: int, stop: int) -> np.ndarray:
        return packed.scales.items((slice(None), slice(start, stop))).T

    def read_zeros(start: int, stop: int) -> np.ndarray:
        words, own = words_around(start, stop, per_word)
        return zeros(words)[:, own].T

    narrow = packed.scales.kind == "F16"
    return Integers(packed.qweight.what, shape, bits, size, codes, read_scales, read_zeros, narrow)


def unpacked_gptq(
    stored: dict[str, Stored],
    group_size: int | None,
    *,
    bits: int,
    zeros_less_one: bool,
    in_order: bool,
) -> dict[str, AnyTensor]:
    """Return the tensors of a model; `in_order`: groups without g_idx are along K."""
    rest = dict(stored)
    found: dict[str, AnyTensor] = {}
    packed = dict(_packed(rest))
    zeros_less_one = _zeros_less_one(list(packed.values()), bits, zeros_less_one)
    for name, parts in packed.items():
        integers = _gptq(parts, bits, group_size, zeros_less_one)
        order = rest.pop(f"{name.removesuffix('.weight')}.g_idx", None)
        if order is None and not in_order:
            raise damaged(parts.qweight.what, "desc_act is true, but there is no g_idx")
        if order is not None:
            order.require(("I32", "I64"), (integers.shape[1],))
            integers = integers._replace(group_of=group_of(order, integers))
        found[name] = tensor_of(integers)
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _zeros_less_one(packed: Sequence[_Packed], bits: int, labelled: bool) -> bool:
    """Tell whether zeros are stored less one, and warn if the files are labelled otherwise.

    All zeros of symmetric weights are one number, half of the integers. Files of the second version
    that are labelled as the first have been published, and their weights of 0 would become -1.
    """
    half = 1 << (bits - 1)
    other = half if labelled else half - 1
    if not packed or not _all_are(other, bits, (parts.qzeros for parts in packed)):
        return labelled
    given, right = ("gptq", "gptq_v2") if labelled else ("gptq_v2", "gptq")
    warnings.warn(
        f"{packed[0].qzeros.what}: all zeros are stored as {other}, which means {other + labelled} "
        f"with checkpoint_format {given!r}, and symmetric weights have {half}; the file is read as "
        f"{right!r}; write that into config.json as checkpoint_format",
        stacklevel=users_level(),
    )
    return not labelled


def _all_are(integer: int, bits: int, tensors: Iterable[Stored]) -> bool:
    words = sum(integer << shift for shift in range(0, _WORD, bits))
    expected = np.array(words, np.uint32).view(np.int32)
    return all((tensor.items(slice(None)) == expected).all() for tensor in tensors)


def group_of(order: Stored, integers: Integers) -> np.ndarray | None:
    """Return the group of each k; None if the groups are consecutive."""
    groups = order.items(slice(None))
    inner = integers.shape[1]
    count = inner // integers.size
    if groups.min() < 0 or groups.max() >= count:
        wrong = groups[(groups < 0) | (groups >= count)][0]
        raise damaged(order.what, f"it has the group {wrong}, and there are {count}")
    return None if np.array_equal(groups, np.arange(inner) // integers.size) else groups


def _gptq(packed: _Packed, bits: int, group_size: int | None, zeros_less_one: bool) -> Integers:
    words, outer = packed.qweight.shape if len(packed.qweight.shape) == 2 else (0, 0)

    def codes(start: int, stop: int) -> np.ndarray:
        """Take the bytes of words as they are: one k, or two k with the even one low."""
        return bytes_of(packed.qweight.items((slice(None), slice(start, stop))).T)

    def zeros(words: slice) -> np.ndarray:
        found = integers_of(packed.qzeros.items((slice(None), words)), bits)
        return (found + 1) & ((1 << bits) - 1) if zeros_less_one else found

    return _integers(packed, (outer, words * _WORD // bits), bits, group_size, codes, zeros)


_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each n in a word."""


def unpacked_awq(stored: dict[str, Stored], group_size: int | None) -> dict[str, AnyTensor]:
    """Return the tensors of a model."""
    rest = dict(stored)
    found = {name: tensor_of(_awq(parts, group_size)) for name, parts in _packed(rest)}
    return {**found, **{name: tensor.as_floats() for name, tensor in rest.items()}}


def _awq(packed: _Packed, group_size: int | None) -> Integers:
    inner, words = packed.qweight.shape if len(packed.qweight.shape) == 2 else (0, 0)

    def codes(start: int, stop: int) -> np.ndarray:
        words, own = words_around(start, stop, len(_PLACES))
        by_row = np.ascontiguousarray(_in_order(packed.qweight, words)[:, own].T)
        return by_row[:, ::2] | by_row[:, 1::2] << 4

    zeros = partial(_in_order, packed.qzeros)
    return _integers(packed, (words * len(_PLACES), inner), 4, group_size, codes, zeros)


def _in_order(packed: Stored, words: slice) -> np.ndarray:
    """Return the integers (rows, columns) of some words, in the order of n."""
    stored = integers_of(packed.items((slice(None), words)), 4)
    in_order = stored.reshape(len(stored), -1, len(_PLACES))[..., _PLACES]
    return in_order.reshape(len(stored), -1)
