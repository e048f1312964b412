"""Integers of four bits in groups with a scale and a zero: what GPTQ and AWQ have in common.

A weight ``NAME.weight`` (N, K) is three tensors: ``NAME.qweight``, ``NAME.qzeros`` and
``NAME.scales``. A word of int32 holds eight integers, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.contents import damaged
from cupyattn.models.checkpoints.safetensors_files import Stored
from cupyattn.models.checkpoints.tensors import QuantisedTensor
from cupyattn.ops.linear.weight_formats import FORMATS, Blocks, blocks_for
from cupyattn.runtime.errors import error

PER_WORD = 8
_SCALES = ("F16", "BF16", "F32")


class Groups(NamedTuple):
    """The three tensors of a weight.

    Attributes
    ----------
    qweight, qzeros, scales : Stored
        As they are in the file.
    """

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
    """Return the weight (N, K); a group that is longer than a block of int4 is several.

    ``read_codes(start, stop)`` gives codes (rows, K / 2), and ``read_zeros`` zeros (groups, rows).
    """
    size = inner if group_size is None else group_size
    if inner < 1 or outer < 1 or outer % PER_WORD or inner % size or inner % 32:
        raise error(
            NotImplementedError,
            f"{groups.qweight.what}: N = {outer}, K = {inner} in groups of {size}",
            f"K is a multiple of the group, and of 32; N of {PER_WORD}",
            "take the model as it was before it was quantised",
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
                f"{groups.scales.what}: scales that float16 has not",
                "a scale is kept in float16",
                "take the model as it was before it was quantised",
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
