"""References of the cache's functions: append tokens, copy blocks, gather sequences.

Caches are (num_blocks, block_size, G, D). Quantised ones are stored as `cache_formats` describes,
with scales (num_blocks, block_size, G). Caches and scales are written in place and may have any
strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyattn.ops.attention.reference.cache_formats import STORED_BITS, dequantise, quantise
from cupyattn.ops.attention.reference.paged import gathered
from cupyattn.ops.attention.reference.quantised import quantize_keys
from cupyattn.ops.norms.reference import norm
from cupyattn.ops.rope.reference import rotate


def normed(
    x: np.ndarray, weight: np.ndarray | None, eps: float, weight_offset: float
) -> NDArray[np.float64]:
    """Normalise each head of tokens x (..., heads, D) by an RMS norm."""
    return norm(x, None, weight, centred=False, eps=eps, weight_offset=weight_offset)[0]


def rotated(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    positions: np.ndarray,
    *,
    interleaved: bool = False,
) -> NDArray[np.float64]:
    """Rotate tokens x (..., heads, D) to their positions (...).

    The rotated features of a token whose position is no row of the tables are NaN.
    """
    known = (positions >= 0) & (positions < len(cos))
    tables = []
    for table in (cos, sin):
        if known.all():
            tables.append(np.asarray(table[positions], np.float64)[..., None, :])
            continue
        rows = np.full((*positions.shape, table.shape[1]), np.nan)
        rows[known] = table[positions[known]]
        tables.append(rows[..., None, :])
    return rotate(x, *tables, interleaved=interleaved)


def append_kv(
    cache: np.ndarray,
    exact: NDArray[np.floating],
    slot_mapping: np.ndarray,
    scales: NDArray[np.float32] | None = None,
    centre: NDArray[np.float32] | None = None,
) -> None:
    """Write tokens (..., G, D) to their slots (...), rounded or quantised; others are skipped.

    Those with a centre (G, D) are keys, stored as `cupyattn.quantize_keys` does.
    If two tokens have one slot, the later one stays.
    """
    num_blocks, block_size = cache.shape[:2]
    written = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    items: NDArray[Any] = exact
    if not written.all():
        slot_mapping, items = slot_mapping[written], exact[written]
    blocks, places = np.divmod(slot_mapping, max(block_size, 1))
    bits = STORED_BITS.get(cache.dtype.name)
    if centre is not None:
        assert scales is not None
        items, scales[blocks, places] = quantize_keys(items, centre)
    elif bits is not None:
        assert scales is not None
        items, scales[blocks, places] = quantise(items, bits)
    with np.errstate(over="ignore"):
        cache[blocks, places] = items.astype(cache.dtype)


def copy_blocks(arrays: Iterable[np.ndarray], copies: Iterable[Iterable[int]]) -> None:
    """Copy blocks in order: array (num_blocks, ...), for each (src, dst); others are skipped."""
    pairs = [(int(src), int(dst)) for src, dst in copies]
    for array in arrays:
        for src, dst in pairs:
            if 0 <= src < len(array) and 0 <= dst < len(array):
                array[dst] = array[src]


def gather(
    cache: np.ndarray,
    block_table: np.ndarray,
    seqlens_k: np.ndarray,
    length: int,
    scales: NDArray[np.float32] | None = None,
) -> np.ndarray:
    """Take the first `length` tokens of each sequence, (B, length, G, D), then zeros.

    Their dtype is float64 for a quantised cache, otherwise the cache's. Blocks of the table that do
    not exist give zeros.
    """
    num_blocks, block_size = cache.shape[:2]
    lengths = np.clip(seqlens_k, 0, min(length, block_table.shape[1] * block_size))
    table = np.where(block_table < num_blocks, block_table, -1)
    tokens = gathered(cache, table, lengths)
    if scales is not None:
        tokens = dequantise(tokens, gathered(scales, table, lengths))
    found = np.zeros((len(lengths), length, *tokens.shape[2:]), tokens.dtype)
    found[:, : tokens.shape[1]] = tokens
    return found
