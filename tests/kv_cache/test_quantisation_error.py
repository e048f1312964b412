"""What 8 and 4 bits cost: values and attention of a cache beside their bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS, NUMPY
from support.search import examples

import cupyattn
from cupyattn import PagedKVCache, reference
from cupyattn.reference.attention.quantised import quantisation_error, stored_attention_bound

BITS = {"int8": 8, "int4": 4}
DTYPES = pytest.mark.parametrize("dtype", BITS)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 24


class Errors(NamedTuple):
    """The largest error over its bound: of k and v read back, and of attention."""

    values: float
    attention: float


def errors(
    dtype: str,
    lengths: list[int],
    seed: int,
    side: Any = NUMPY,
    xp: Any = np,
    counts: list[int] | None = None,
) -> Errors:
    """Fill a cache with ragged sequences, read it back, and attend from each one's last tokens.

    By default that is one token each; otherwise queries are packed, and causal.
    """
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    k, v = rng.standard_normal((2, total, KV_HEADS, HEAD_DIM)).astype(np.float32)
    k *= rng.choice((0.1, 1, 3), (total, 1, 1)).astype(np.float32)
    packed = counts is not None
    counts = counts or [1] * len(lengths)
    q = rng.standard_normal((sum(counts), HEADS, HEAD_DIM)).astype(np.float32)
    cache = PagedKVCache(2, 40, 16, KV_HEADS, HEAD_DIM, dtype=dtype, xp=xp)
    sequences = [cache.allocator.add([0] * length) for length in lengths]
    cache.append(1, side.put(k), side.put(v), cache.step_tables(sequences, lengths))
    tables = cache.step_tables(sequences, counts)
    kept = cupyattn.gather(
        cache.k[1], cache.v[1], tables.block_table, tables.seqlens_k,
        dtype="float32", **cache.scales(1),
    )  # fmt: skip
    queries = side.put(q if packed else q[:, None])
    out, lse = map(side.get, cache.attend(1, queries, tables, causal=True, return_lse=True))
    if not packed:
        out, lse = out[:, 0], lse[..., 0].T
    k_kept, v_kept = map(side.get, kept)
    worst = [0.0, 0.0]
    start = first = 0
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        of_sequence = slice(start, start := start + length)
        given = k[None, of_sequence], v[None, of_sequence]
        there = k_kept[b : b + 1, :length], v_kept[b : b + 1, :length]
        for x, found in zip(given, there, strict=True):
            bound = reference.quantisation_bound(x, BITS[dtype])[0]
            bound = bound + reference.gather_bound(found, "float32")
            worst[0] = max(worst[0], reference.error_ratio(found, x, bound))
        rows = slice(first, first := first + count)
        query = q[None, rows]
        stored, scales = zip(*(reference.quantise(x, BITS[dtype]) for x in given), strict=True)
        bounds = (
            quantisation_error(query, *given, BITS[dtype], causal=True),
            reference.attention_bound(query, *there, dtype="float32", tile_k=16, causal=True),
            stored_attention_bound(query, *stored, *scales, causal=True),
        )
        exact = reference.attention(query, *given, causal=True)
        for i, found in enumerate((out[None, rows], lse[None, :, rows])):
            bound = sum(each[i] for each in bounds)
            worst[1] = max(worst[1], reference.error_ratio(found, exact[i], bound))
    return Errors(*worst)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@DTYPES
@given(lengths=LENGTHS, seed=st.integers(0, 2**16), packed=st.booleans())
@examples(6)
def test_errors_are_within_their_bounds(dtype, lengths, seed, packed):
    rng = np.random.default_rng(seed)
    counts = [int(rng.integers(0, length + 1)) for length in lengths] if packed else None
    found = errors(dtype, lengths, seed, counts=counts)
    assert found.values <= 1
    assert found.attention <= 1


@pytest.mark.nvrtc
@DTYPES
@pytest.mark.parametrize("counts", [None, [20, 1, 0]])
def test_the_kernels_are_within_them_too(dtype, counts):
    with KERNELS.running():
        found = errors(dtype, [33, 1, 16], 3, KERNELS, KERNELS.xp, counts)
    assert found.values <= 1
    assert found.attention <= 1


@DTYPES
def test_the_bounds_are_near(dtype):
    """Values come close to theirs; attention, whose bound is that of the worst case, to a part."""
    found = errors(dtype, [50, 9, 17], 0)
    assert found.values > 0.95
    assert found.attention > {"int8": 0.05, "int4": 0.005}[dtype]


@DTYPES
def test_a_scale_that_is_off_is_found(dtype, monkeypatch):
    append = PagedKVCache.append

    def wrong(self, layer, *arrays, **options):
        append(self, layer, *arrays, **options)
        self.k_scales[layer] *= 1.5

    monkeypatch.setattr(PagedKVCache, "append", wrong)
    assert errors(dtype, [50, 9, 17], 0).values > 1
