"""GGUF's blocks that are kept as they are: Q4_0, Q4_1, Q8_0 and Q4_K (ggml's ggml-common.h).

A row is blocks one behind the other, each with its scales before its integers. Of a block of 32 in
four bits byte j has weight j in its low half and weight j + 16 in its high one. Q4_K has eight
blocks of 32 in a super-block, and pairs of them in the halves of 32 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from cupyattn import QuantizedWeight
from cupyattn.models.checkpoints.tensors import QuantisedTensor
from cupyattn.ops.linear.weight_formats import Blocks

_BLOCK = 32
_Arrays = dict[str, np.ndarray]


def kept_blocks(kind: str, stored: np.ndarray, inner: int) -> QuantisedTensor | None:
    """Return a matrix of bytes (N, bytes of a row) as a tensor (N, K); None if it is not kept.

    Parameters
    ----------
    kind : str
        As GGUF calls it.
    stored : uint8 array
        As the file has it.
    inner : int
        K.
    """
    if kind not in _KINDS:
        return None
    found = _KINDS[kind]
    read = partial(_rows, found, stored)
    return QuantisedTensor((len(stored), inner), Blocks(found.format, _BLOCK), read)


class _Kind(NamedTuple):
    """How blocks of a kind are read."""

    format: str
    size: int
    """Bytes."""
    unpack: Callable[[np.ndarray], _Arrays]
    """From blocks (rows, blocks, bytes) to arrays whose first axis is that of rows."""


def _rows(kind: _Kind, stored: np.ndarray, start: int, stop: int) -> QuantizedWeight:
    blocks = np.asarray(stored[start:stop]).reshape(stop - start, -1, kind.size)
    arrays = kind.unpack(blocks)
    codes = np.ascontiguousarray(arrays.pop("codes")).reshape(stop - start, -1)
    rest = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return QuantizedWeight(kind.format, codes, **rest, block_size=_BLOCK, transposed=True)


def _q4_0(blocks: np.ndarray) -> _Arrays:
    scale = _halves(blocks[..., :2])[..., 0]
    zero = np.full_like(scale, 8)
    return {"codes": _by_pairs(blocks[..., 2:]), "scales": np.stack([scale, zero], axis=-1)}


def _q4_1(blocks: np.ndarray) -> _Arrays:
    return {"codes": _by_pairs(blocks[..., 4:]), "scales": _halves(blocks[..., :4])}


def _q8_0(blocks: np.ndarray) -> _Arrays:
    scale = _halves(blocks[..., :2])[..., 0].astype(np.float32)
    return {"codes": blocks[..., 2:].view(np.int8), "scales": scale}


def _q4_k(blocks: np.ndarray) -> _Arrays:
    """Unpack (d, dmin), eight (sc, m) of 6 bits in 12 bytes, and 256 integers.

    The first four sc, then m, have a byte each, of which they leave two bits; the others' low
    halves share bytes 8 to 11, and their high bits are those left.
    """
    rows, supers = blocks.shape[:2]
    sc, m, halves = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([sc & 63, halves & 15 | sc >> 6 << 4], axis=-1)
    minima = np.concatenate([m & 63, halves >> 4 | m >> 6 << 4], axis=-1)
    integers = blocks[..., 16:].reshape(rows, supers, 4, _BLOCK)
    pairs = [integers & 15, integers >> 4]
    own = np.stack([each[..., ::2] | each[..., 1::2] << 4 for each in pairs], axis=-2)
    return {
        "codes": own,
        "scales": np.stack([scales, minima], axis=-1).reshape(rows, -1, 2),
        "super_scales": _halves(blocks[..., :4]),
    }


def _by_pairs(integers: np.ndarray) -> np.ndarray:
    """Turn 16 bytes with weights j and j + 16 into 16 with 2 j and 2 j + 1."""
    even, odd = integers[..., ::2], integers[..., 1::2]
    return np.concatenate([even & 15 | odd << 4, even >> 4 | odd & 240], axis=-1)


def _halves(stored: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(stored).view("<f2").astype(np.float16, copy=False)


_KINDS = {
    "Q4_0": _Kind("int4", 18, _q4_0),
    "Q4_1": _Kind("q4_1", 20, _q4_1),
    "Q8_0": _Kind("int8", 34, _q8_0),
    "Q4_K": _Kind("q4_k", 144, _q4_k),
}
