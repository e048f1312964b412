"""Test cases of attention over a paged cache, and the strategy that draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyattn import reference
from cupyattn.runtime.arrays import dtype_of
from cupyattn.testing.arrays import SEEDS, NumpyArray, PastableCase

CACHE_LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 129, 300)
"""One token, the ends of tiles and blocks, the unit of a CTA, and several of them."""


@dataclass(frozen=True, repr=False)
class PagedCase(PastableCase):
    """A call of `cupyattn.paged_attention`. The fields determine the arrays.

    The blocks of a sequence are anywhere in the pool. All other slots hold NaN, and entries of the
    table that may not be read are far outside of the pool. Values differ in size from token to
    token if they are quantised; the integers of unused slots are then random, and their scales NaN.

    Parameters
    ----------
    lengths : tuple of int
        Tokens in the cache, for each sequence.
    Sq : int
        Queries of each sequence: its last tokens.
    G : int
        Key-value heads.
    group : int
        Query heads for each key-value head.
    D : int
        Head dim.
    dtype : str
        "float16", "bfloat16" or "float32".
    block_size : int
        Tokens in a block.
    options : tuple of (name, value)
        Options of the call as `cupyattn.paged_attention` takes them. alibi_slopes and sinks are
        drawn, whatever their value is here.
    seed : int
        What the numbers in the arrays depend on.
    bits : int, optional
        8 or 4 for a quantised cache.

    Examples
    --------
    >>> case = PagedCase(lengths=(5, 17), Sq=1, G=2, group=4, D=64, dtype="float16")
    >>> q, k_cache, v_cache, block_table, seqlens_k = case.arrays()
    >>> q.shape, k_cache.shape, block_table.shape, seqlens_k
    ((2, 1, 8, 64), (7, 16, 2, 64), (2, 3), array([ 5, 17], dtype=int32))
    """

    lengths: tuple[int, ...]
    Sq: int
    G: int
    group: int
    D: int
    dtype: str
    block_size: int = 16
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    bits: int | None = None

    @property
    def heads(self) -> int:
        """H, the number of query heads."""
        return self.G * self.group

    def queries_of(self, b: int) -> int:
        """Return the number of queries of a sequence."""
        return self.Sq

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments; slopes and sinks are every second item."""
        rng = np.random.default_rng(self.seed + 1)
        keywords = dict(self.options)
        for name in ("alibi_slopes", "sinks"):
            if name in keywords:
                keywords[name] = rng.standard_normal(2 * self.heads).astype(np.float32)[::2]
        if self.bits is not None:
            keywords |= dict(zip(("k_scales", "v_scales"), self.stored()[5:], strict=True))
        return keywords

    def arrays(self) -> tuple[NumpyArray, ...]:
        """Return q, k_cache, v_cache, block_table and seqlens_k."""
        return self.stored()[:5]

    def stored(self, order: int = 0) -> tuple[NumpyArray, ...]:
        """Return the arrays, and with `bits` k_scales and v_scales after them.

        Another `order` puts the blocks elsewhere in the pool.
        """
        rng, dtype = np.random.default_rng(self.seed), dtype_of(self.dtype)
        size, batch = self.block_size, len(self.lengths)
        columns = max(1, *(-(-length // size) for length in self.lengths)) + 1
        num_blocks = batch * columns + 1
        q = rng.standard_normal((batch, self.Sq, self.heads, self.D)).astype(dtype)
        ids = np.random.default_rng((self.seed, order)).permutation(num_blocks)
        table = np.full((batch, columns), 2**30, np.int32)
        caches = np.full((2, num_blocks, size, self.G, self.D), np.nan, dtype)
        left = (dict(self.options).get("window_size") or (None, None))[0]
        for b, length in enumerate(self.lengths):
            queries = self.queries_of(b)
            seen_from = 0 if left is None else max(0, length - queries - left)
            if queries == 0:
                continue
            tokens = rng.standard_normal((2, length, self.G, self.D)).astype(dtype)
            if self.bits is not None:
                tokens[1] *= np.exp2(rng.integers(-12, 4, (length, self.G, 1))).astype(dtype)
            for column in range(-(-length // size)):
                at, end = column * size, min((column + 1) * size, length)
                if end <= seen_from:
                    table[b, column] = -1
                    continue
                table[b, column] = block = ids[b * columns + column]
                caches[:, block, : end - at] = tokens[:, at:end]
        lengths = np.array(self.lengths, np.int32)
        if self.bits is None:
            return q, *caches, table, lengths
        return self._quantised(q, caches, table, lengths, self.bits)

    def _quantised(
        self, q: NumpyArray, caches: NumpyArray, table: NumpyArray, lengths: NumpyArray, bits: int
    ) -> tuple[NumpyArray, ...]:
        """Quantise the caches; slots that are not used hold any integers, and scales of NaN."""
        used = np.asarray(~np.isnan(caches).any(axis=-1))
        stored, scales = reference.quantise(np.where(used[..., None], caches, 0), bits)
        least, most = (-127, 128) if bits == 8 else (0, 256)
        wild = np.random.default_rng(self.seed + 2).integers(least, most, stored.shape)
        stored = np.where(used[..., None], stored, wild.astype(stored.dtype))
        side_by_side = np.full(scales.swapaxes(2, 3).shape, np.nan, np.float32).swapaxes(2, 3)
        side_by_side[...] = np.where(used, scales, np.float32(np.nan))
        return q, *stored, table, lengths, *side_by_side


@st.composite
def paged_cases(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[int] = (64,),
    dtypes: Sequence[str] = ("float16", "float32"),
    bits: Sequence[int | None] = (None,),
    options: Sequence[str] = ("causal", "window_size"),
    block_sizes: Sequence[int] = (16, 32, 48, 256),
    most_queries: int = 16,
    most_group: int = 8,
) -> PagedCase:
    """Draw calls of `cupyattn.paged_attention`: lengths next to the ends of blocks and tiles.

    Parameters
    ----------
    head_dims, dtypes, bits, block_sizes : sequences
        Values to draw from. Each head dim, dtype and number of bits is a kernel to compile.
    options : sequence of str
        What may be drawn: "causal", "window_size", "softcap", "alibi_slopes" and "sinks".
    most_queries : int
        The most queries of a sequence.
    most_group : int
        The most query heads for each key-value head.

    Returns
    -------
    hypothesis strategy of PagedCase
    """
    side = st.sampled_from((0, 1, 15, 16, 40, 100, None))
    values: dict[str, st.SearchStrategy[Any]] = {
        "causal": st.just(True),
        "window_size": st.tuples(side, st.sampled_from((0, 2, None))),
        "softcap": st.sampled_from((2.0, 15.0, 50.0)),
        "alibi_slopes": st.just(True),
        "sinks": st.just(True),
    }
    if unknown := set(options) - values.keys():
        raise ValueError(f"unknown options {sorted(unknown)}; the strategy has {list(values)}")
    drawn = tuple((name, draw(values[name])) for name in options if draw(st.booleans()))
    lengths = st.lists(st.sampled_from(CACHE_LENGTHS), min_size=1, max_size=5)
    return PagedCase(
        lengths=tuple(draw(lengths)),
        Sq=draw(st.integers(1, most_queries)),
        G=draw(st.integers(1, 2)),
        group=draw(st.integers(1, most_group)),
        D=draw(st.sampled_from(tuple(head_dims))),
        dtype=draw(st.sampled_from(tuple(dtypes))),
        block_size=draw(st.sampled_from(tuple(block_sizes))),
        options=drawn,
        seed=draw(SEEDS),
        bits=draw(st.sampled_from(tuple(bits))),
    )
