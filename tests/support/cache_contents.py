"""A paged KV cache whose sequences are known token by token: what each must find in its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from support.block_model import content
from support.devices import NUMPY, dtype_of

import cupyattn
from cupyattn import PagedKVCache, reference
from cupyattn.ops.attention.reference.cache_formats import STORED_BITS

LAYERS, HEADS, HEAD_DIM = 2, 3, 6
CACHE_DTYPES = ("float16", "bfloat16", "float32", "int8", "int4")
BASE: dict[str, Any] = {
    "num_layers": 2, "num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_dim": 8,
    "dtype": "float16", "xp": np,
}  # fmt: skip
"""The arguments of a small cache."""


def token_dtype(dtype: str) -> np.dtype[Any]:
    """The dtype of keys and values that a cache of this one takes."""
    return dtype_of("float32" if dtype.startswith("int") else dtype)


def keys_and_values(tokens: Sequence[int], layer: int, dtype: str) -> np.ndarray:
    """(2, tokens, heads, head dim): those of a token depend on all that come before it."""
    before, seeds = 0, []
    for token in tokens:
        before = content(before, token)
        seeds.append(before % 100_003)
    at = np.array(seeds, np.float64)[:, None, None]
    heads, items = np.arange(HEADS)[:, None], np.arange(HEAD_DIM)
    both = [np.sin(at * (1 + layer + 2 * part) + 7 * heads + items) for part in range(2)]
    return np.stack(both).astype(token_dtype(dtype))


class KnownCache:
    """A cache, and the tokens of its sequences: `write` appends, `require_contents` reads."""

    def __init__(self, dtype: str, *, side: Any = NUMPY, xp: Any = np, **options: Any) -> None:
        sizes = {"num_blocks": 24, "block_size": 16, **options}
        self.cache = PagedKVCache(
            LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=dtype, xp=xp, **sizes
        )
        self.allocator = self.cache.allocator
        self.side = side
        self.tokens: dict[int, list[int]] = {}

    def write(self, sequences: Sequence[cupyattn.Sequence], counts: Iterable[int]) -> None:
        """Compute the last tokens of sequences, whose tokens `self.tokens` has by id."""
        counts = list(counts)
        tables = self.cache.step_tables(sequences, counts)
        for layer in range(LAYERS):
            new = [
                keys_and_values(self.tokens[id(each)], layer, self.cache.dtype)[
                    :, len(each) - count :
                ]
                for each, count in zip(sequences, counts, strict=True)
            ]
            if new:
                k, v = (self.side.put(part) for part in np.concatenate(new, axis=1))
                self.cache.append(layer, k, v, tables)

    def require_contents(self, sequences: Sequence[cupyattn.Sequence]) -> None:
        """Every block of every sequence holds its tokens, bit for bit."""
        arrays = {"k": self.cache.k, "v": self.cache.v}
        arrays |= {"k_scales": self.cache.k_scales, "v_scales": self.cache.v_scales}
        found = {name: self.side.get(each) for name, each in arrays.items() if each is not None}
        size = self.allocator.block_size
        for sequence in sequences:
            for layer in range(LAYERS):
                expected = keys_and_values(self.tokens[id(sequence)], layer, self.cache.dtype)
                for part, stored in zip("kv", expected, strict=True):
                    wanted = {part: stored}
                    if self.cache.dtype.startswith("int"):
                        bits = STORED_BITS[self.cache.k.dtype.name]
                        quantised = reference.quantise(stored, bits)
                        wanted = dict(zip((part, f"{part}_scales"), quantised, strict=True))
                    for name, items in wanted.items():
                        for place, block in enumerate(sequence.block_ids):
                            of_block = items[place * size : (place + 1) * size]
                            there = found[name][layer, block, : len(of_block)]
                            assert block < 0 or there.tobytes() == of_block.tobytes()
