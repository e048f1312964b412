"""Paged caches for tests: random lengths, blocks anywhere in the pool, NaN in what is not used.

Queries are one row for each sequence, or packed sequences with different numbers of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.devices import KERNELS, dtype_of

import cupyattn
from cupyattn import reference
from cupyattn.ops.attention import paged as decode
from cupyattn.ops.attention.choice import MAX_QUERIES
from cupyattn.ops.attention.reference.cache_formats import quantise
from cupyattn.ops.attention.reference.paged import gathered
from cupyattn.ops.attention.reference.quantised import (
    dequantised_attention_bound,
    stored_attention_bound,
)
from cupyattn.runtime.device.cuda import device_count
from cupyattn.runtime.device.emulated import EmulatedDevice

# One token, a tile's and a block's ends, a CTA's unit, and past a few of them.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 129, 300)


@dataclass(frozen=True)
class PagedProblem:
    """A call of paged attention, its data drawn by `seed`.

    A sequence's slots are anywhere in the pool; all others hold NaN, and entries of the table that
    may not be read are wild. With `bits` the caches are integers, of values of V whose size differs
    from token to token, those of unused slots random, and scales NaN there; scales of one head lie
    side by side.
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
        """H."""
        return self.G * self.group

    @property
    def decoded(self) -> bool:
        """Tell whether the kernel for few queries is used."""
        return self.Sq <= MAX_QUERIES

    def queries_of(self, b: int) -> int:
        """Query tokens of a sequence."""
        return self.Sq

    def keywords(self) -> dict[str, Any]:
        """The options; slopes and sinks are drawn, and lie two items apart."""
        rng = np.random.default_rng(self.seed + 1)
        keywords = dict(self.options)
        for name in ("alibi_slopes", "sinks"):
            if name in keywords:
                keywords[name] = rng.standard_normal(2 * self.heads).astype(np.float32)[::2]
        return keywords

    def arrays(self, order: int = 0) -> tuple[np.ndarray, ...]:
        """q, k_cache, v_cache, block_table, seqlens_k; `order` draws another place in the pool.

        With `bits` k_scales and v_scales follow.
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
        return self._stored(q, caches, table, lengths)

    def _stored(self, q: np.ndarray, caches: np.ndarray, *others: np.ndarray) -> Any:
        """Quantise the caches; what is not used is NaN, and becomes anything."""
        assert self.bits is not None
        used = ~np.isnan(caches).any(axis=-1)
        stored, scales = quantise(np.where(used[..., None], caches, 0), self.bits)
        least, most = (-127, 128) if self.bits == 8 else (0, 256)
        wild = np.random.default_rng(self.seed + 2).integers(least, most, stored.shape)
        stored = np.where(used[..., None], stored, wild.astype(stored.dtype))
        side_by_side = np.full(scales.swapaxes(2, 3).shape, np.nan, np.float32).swapaxes(2, 3)
        side_by_side[...] = np.where(used, scales, np.float32(np.nan))
        return q, *stored, *others, *side_by_side

    def ratio(self, out: np.ndarray, lse: np.ndarray, arrays: tuple[np.ndarray, ...]) -> float:
        """The largest error over its bound."""
        exact = reference.paged_attention(*arrays[:5], **scales_of(arrays), **self.keywords())
        caches = [(arrays[1], *arrays[5:6]), (arrays[2], *arrays[6:])]
        k, v = (gathered(cache, *arrays[3:5], *scales) for cache, *scales in caches)
        options = {"seqused_k": arrays[4], **self.keywords()}
        bounds: Any = reference.attention_bound(
            arrays[0], k, v, dtype=self.dtype, tile_k=16, **options
        )
        if self.bits is not None:
            stored = (gathered(arrays[i], *arrays[3:5]) for i in (1, 2, 5, 6))
            bound_of = stored_attention_bound if self.decoded else dequantised_attention_bound
            more = bound_of(arrays[0], *stored, **options)
            bounds = tuple(a + b for a, b in zip(bounds, more, strict=True))
        return max(
            reference.error_ratio(*each) for each in zip((out, lse), exact, bounds, strict=True)
        )


def scales_of(arrays: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Name what follows the first five arrays."""
    return dict(zip(("k_scales", "v_scales"), arrays[5:], strict=False))


def on_emulator(problem: PagedProblem, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
    """Run the kernels with all checks; returns out and lse."""
    with cupyattn.backend("emulator"):
        return cupyattn.paged_attention(
            *arrays[:5], **scales_of(arrays), **problem.keywords(), return_lse=True, **more
        )


def on_kernels(problem: PagedProblem, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
    """Run the kernels on the GPU, if there is one, otherwise on the emulator."""
    keywords = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in (problem.keywords() | scales_of(arrays) | more).items()
    }
    with KERNELS.running():
        results = cupyattn.paged_attention(
            *map(KERNELS.put, arrays[:5]), **keywords, return_lse=True
        )
    return tuple(map(KERNELS.get, results))


@contextmanager
def keys_shared() -> Iterator[None]:
    """Let the CTAs of decoding share keys of short sequences too, as they do those of long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "WHOLE_KEYS", 0)
        decode._plan.cache_clear()  # a plan is remembered for its problem
        yield
    decode._plan.cache_clear()


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Let the device of the kernels have so many: the shares of CTAs end elsewhere."""
    device = KERNELS.device if device_count() else EmulatedDevice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "multiprocessors", count)
        yield


@dataclass(frozen=True)
class PackedProblem(PagedProblem):
    """A call with cu_seqlens_q; Sq is max_seqlen_q, and `spare` more rows follow the last."""

    queries: tuple[int, ...] = ()
    spare: int = 0

    @property
    def decoded(self) -> bool:
        return False

    def queries_of(self, b: int) -> int:
        return self.queries[b]

    @property
    def bounds(self) -> np.ndarray:
        """cu_seqlens_q."""
        return np.cumsum((0, *self.queries), dtype=np.int32)

    def arrays(self, order: int = 0) -> tuple[np.ndarray, ...]:
        q, *others = super().arrays(order)
        rows = [q[b, : self.queries[b]] for b in range(len(self.queries))]
        after = np.full((self.spare, *q.shape[2:]), np.nan, q.dtype)
        return np.concatenate([*rows, after]), *others

    def sequences(self, arrays: tuple[np.ndarray, ...]) -> Any:
        """Each sequence's own rows, and its arrays as a call of one sequence."""
        q, k, v, table, lengths, *scales = arrays
        for b, (begin, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            if begin < end:
                own = slice(b, b + 1)
                rows = slice(begin, end)
                yield rows, (q[None, rows], k, v, table[own], lengths[own], *scales)

    def ratio(self, out: np.ndarray, lse: np.ndarray, arrays: tuple[np.ndarray, ...]) -> float:
        """The largest error of any sequence over its bound."""
        return max(
            (
                super(PackedProblem, self).ratio(out[None, rows], lse[None, :, rows], own)
                for rows, own in self.sequences(arrays)
            ),
            default=0.0,
        )

    def call(self, arrays: tuple[np.ndarray, ...], **more: Any) -> Any:
        """Run the kernels on the GPU, if there is one, otherwise on the emulator."""
        there = {
            name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
            for name, value in {"cu_seqlens_q": self.bounds, **self.keywords(), **more}.items()
        }
        with KERNELS.running():
            results = self.on_arrays(tuple(map(KERNELS.put, arrays)), **there)
        return tuple(map(KERNELS.get, results))

    def on_arrays(self, arrays: tuple[Any, ...], **more: Any) -> Any:
        """Call paged_attention where the arrays are; out and lse."""
        given = {"cu_seqlens_q": self.bounds, **self.keywords(), **scales_of(arrays), **more}
        return cupyattn.paged_attention(*arrays[:5], max_seqlen_q=self.Sq, return_lse=True, **given)
