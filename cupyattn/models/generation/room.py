"""How many blocks a cache gets: what sequences need, and what the memory at hand holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyattn.models.generation.options import as_count
from cupyattn.runtime.errors import error

SHARE = 0.9
"""The part of the free memory that a cache may take; steps compute in the rest."""
_MOST_BLOCK_SIZE = 2**31 - 16
"""A multiple of 16; a cache counts its slots in int32."""
_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "int8": 8, "int4": 4}


def blocks_at_hand(model: Any, dtype: Any, block_size: int, lengths: Sequence[int]) -> int:
    """Return how many blocks sequences of these lengths fill, or the most that there is room for.

    Raises
    ------
    TypeError, ValueError
        For a block size that no cache has.
    MemoryError
        If the longest alone has no room.
    """
    block_size = as_count("block_size", block_size, 16, _MOST_BLOCK_SIZE)
    needed = [-(-length // block_size) for length in lengths]
    room = int(SHARE * free_bytes(model.xp)) // block_bytes(model.config, dtype, block_size)
    if room < max(needed):
        raise error(
            MemoryError,
            f"a sequence of {max(lengths)} tokens needs {max(needed)} blocks of the cache",
            f"the free memory holds {room}",
            "generate fewer tokens, pass num_blocks, or keep the cache in cache_dtype='int8'",
        )
    return min(sum(needed), room)


def block_bytes(config: Any, dtype: Any, block_size: int) -> int:
    """Return the size of a block in all layers."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    bits = config.head_dim * _BITS.get(name, 32) + (32 if name.startswith("int") else 0)
    return 2 * config.num_layers * block_size * config.num_kv_heads * bits // 8


def free_bytes(xp: Any) -> int:
    """Return the free memory where arrays of a library are: of the current GPU, or of the host."""
    if xp is not np:
        free, _ = xp.cuda.runtime.memGetInfo()
        return free + xp.get_default_memory_pool().free_bytes()
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return 1 << 33
