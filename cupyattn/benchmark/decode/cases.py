"""One step of decoding: its sizes, its arrays, its calls, and the bytes that it has to read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cupyattn
from cupyattn.arrays import dtype_of
from cupyattn.benchmark.frame.clock import COLD_BYTES, Round
from cupyattn.kernels.configs.dtypes import STORAGE
from cupyattn.reference.kv_cache.quantisation import quantise

CACHES = {"float": None, "int8": 8, "int4": 4}
"""What paged caches hold, and bits of an integer."""
SHORTEST = 256
"""Tokens, of ragged sequences."""
_SCALE_BYTES = 4


class Case(NamedTuple):
    """One step; `ragged` draws lengths from 256 to the context instead of taking that.

    Without a block_size keys and values are dense, and the step is a call of `attention`.
    """

    batch: int
    context: int
    ragged: bool
    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    block_size: int | None
    dtype: str
    cache: str = "float"
    heads_first: bool = False
    """In memory a block's slots of one head lie side by side, not a slot's heads."""

    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        if not self.ragged:
            return np.full(self.batch, self.context, np.int32)
        shortest = min(SHORTEST, self.context)
        drawn = np.random.default_rng(0).integers(shortest, self.context + 1, self.batch)
        return drawn.astype(np.int32)

    def bytes_of(self, lengths: np.ndarray) -> int:
        """K and V of all tokens, and their scales."""
        bits = CACHES[self.cache]
        row = self.head_dim * (STORAGE[self.dtype] if bits is None else bits / 8)
        row += 0 if bits is None else _SCALE_BYTES
        return int(lengths.sum() * 2 * self.kv_heads * row)

    def arrays(self, xp: Any) -> tuple[Any, ...]:
        """Return q, the caches, the table and lengths; blocks lie anywhere in the pool.

        Dense keys and values are blocks as long as the longest sequence, without a table. Caches of
        integers are followed by their scales, each head's side by side.
        """
        lengths = self.lengths()
        block_size = self.block_size or int(lengths.max())
        columns = -(-int(lengths.max()) // block_size)
        num_blocks = self.batch * columns
        ids = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
        dtype = dtype_of(self.dtype)
        pool = (num_blocks, block_size, self.kv_heads, self.head_dim)
        rng = np.random.default_rng(2)
        some = rng.standard_normal((1, *pool[1:]), dtype=np.float32).astype(dtype)
        bits = CACHES[self.cache]
        stored, *scales = (some,) if bits is None else quantise(some, bits)
        q = rng.standard_normal(
            (self.batch, self.queries, self.heads, self.head_dim), dtype=np.float32
        ).astype(dtype)
        caches = [self._pool(xp, stored, num_blocks, self.heads_first) for _ in range(2)]
        all_scales = [self._pool(xp, each, num_blocks, True) for each in (*scales, *scales)]
        table = [] if self.block_size is None else [xp.asarray(ids.reshape(self.batch, -1))]
        return xp.asarray(q), *caches, *table, xp.asarray(lengths), *all_scales

    def _pool(self, xp: Any, block: np.ndarray, num_blocks: int, heads_first: bool) -> Any:
        """Return that many copies of a block (1, block_size, G, ...)."""
        shape = (num_blocks, *block.shape[1:])
        if heads_first:
            pool = xp.empty((shape[0], shape[2], shape[1], *shape[3:]), block.dtype).swapaxes(1, 2)
        else:
            pool = xp.empty(shape, block.dtype)
        pool[...] = xp.asarray(block)
        return pool

    def step(self, xp: Any, layers: int) -> Round:
        """Return the calls of a step, one for each layer of a model."""
        return self.in_turn(layers, partial(self.call, xp))

    def in_turn(self, layers: int, make: Callable[[], Callable[[], Any]]) -> Round:
        """Return a call for each layer.

        Layers take caches in turn, of which all together are larger than any L2.
        """
        caches = -(-COLD_BYTES // max(self.bytes_of(self.lengths()), 1))
        calls = [make() for _ in range(min(caches, layers))]
        return [calls[layer % len(calls)] for layer in range(layers)]

    def call(self, xp: Any) -> Callable[[], Any]:
        """Return the call of a layer, into an array of its own."""
        arrays = self.arrays(xp)
        out = xp.empty(arrays[0].shape, arrays[0].dtype)
        if self.block_size is not None:
            scales = dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))
            return partial(cupyattn.paged_attention, *arrays[:5], **scales, causal=True, out=out)
        q, k, v, lengths = arrays
        used = lengths if self.ragged else None
        return partial(cupyattn.attention, q, k, v, causal=True, seqused_k=used, out=out)
