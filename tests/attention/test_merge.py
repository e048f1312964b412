"""Parts of attention merged: results of two calls, and a prompt that its continuations share."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support.devices import KERNELS, dtype_of, everywhere
from support.search import deep, examples, wider

import cupyattn
from cupyattn import PagedKVCache, reference

pytestmark = pytest.mark.nvrtc


Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def parts(shape: tuple[int, ...], dtype: str, seed: int = 0, spread: float = 3.0) -> Parts:
    """Two parts; some rows of either have no keys, and then NaN in out."""
    rng, kind = np.random.default_rng(seed), dtype_of(dtype)
    batch, seq, heads, _ = shape
    arrays = []
    for _ in range(2):
        out = rng.standard_normal(shape).astype(kind)
        lse = (spread * rng.standard_normal((batch, heads, seq))).astype(np.float32)
        none = rng.random(lse.shape) < 0.3
        lse[none] = -np.inf
        out[np.swapaxes(none, 1, 2)] = np.nan
        arrays += [out, lse]
    return tuple(arrays)


@given(
    shape=st.tuples(
        st.integers(1, 3),
        st.integers(0, 5),
        st.integers(1, 3),
        st.sampled_from(wider((1, 33), (31, 32, 256))),
    ),
    dtype=st.sampled_from(wider(("float16",), ("float32", "bfloat16"))),
    wide=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    spread=st.sampled_from((0.0, 3.0, 60.0)),
    seed=st.integers(0, 999),
)
@examples(5)
def test_within_the_bound(shape, dtype, wide, spread, seed):
    """Parts and the result each in the dtype, or in float32."""
    kinds = [np.dtype(np.float32) if each else dtype_of(dtype) for each in wide]
    out_a, lse_a, out_b, lse_b = parts(shape, dtype, seed, spread)
    arrays = out_a.astype(kinds[0]), lse_a, out_b.astype(kinds[1]), lse_b
    given = KERNELS.put(np.zeros(shape, kinds[2])), KERNELS.put(np.zeros_like(lse_a))
    with KERNELS.running():
        found = cupyattn.merge_attention(*map(KERNELS.put, arrays), out=given)
    assert found[0] is given[0]
    found = tuple(map(KERNELS.get, found))
    exact = reference.merge_attention(*arrays)
    bounds = reference.merge_attention_bound(*arrays, dtype=kinds[2].name)
    for result, right, bound in zip(found, exact, bounds, strict=True):
        assert reference.error_ratio(result, right, bound) <= 1


def test_a_split_of_the_keys_is_merged_exactly():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 8))
    k, v = rng.standard_normal((2, 2, 20, 2, 8))
    whole = cupyattn.attention(q, k, v, return_lse=True)
    for cut in (0, 1, 13, 20):
        first = cupyattn.attention(q, k[:, :cut], v[:, :cut], return_lse=True)
        second = cupyattn.attention(q, k[:, cut:], v[:, cut:], return_lse=True)
        for merged in (
            cupyattn.merge_attention(*first, *second),
            cupyattn.merge_attention(*second, *first),
        ):
            assert all(np.allclose(a, b, atol=1e-13) for a, b in zip(merged, whole, strict=True))


@everywhere
@pytest.mark.parametrize("lse", [0, 1e6, 1e12, 1e16, -1e16, 3e38])
def test_parts_with_one_large_lse_have_their_mean(side, lse):
    """The sum of two weights of 1/2 each, whatever digits the logarithm of the sum has left."""
    rng = np.random.default_rng(0)
    out_a, out_b = rng.standard_normal((2, 2, 3, 4, 8), dtype=np.float32)
    both = np.full((2, 4, 3), lse, np.float32)
    arrays = out_a, both, out_b, both
    out, merged = map(side.get, cupyattn.merge_attention(*map(side.put, arrays)))
    bound, _ = reference.merge_attention_bound(*arrays)
    assert reference.error_ratio(out, (out_a.astype(np.float64) + out_b) / 2, bound) <= 1
    assert_allclose(merged, both + np.log(2), rtol=2**-22)


@everywhere
@pytest.mark.parametrize("other", [0.0, -np.inf, np.inf])
@pytest.mark.parametrize("lse", [np.inf, np.nan])
def test_infinite_or_missing_lse_gives_nan(side, lse, other):
    """In its row alone, whichever part has it."""
    out = np.ones((1, 2, 1, 8), np.float32)
    without = np.array([[[other, 0.0]]], np.float32)
    with_it = np.array([[[lse, 0.0]]], np.float32)
    for lses in ((with_it, without), (without, with_it)):
        arrays = map(side.put, (out, lses[0], out, lses[1]))
        merged, found = map(side.get, cupyattn.merge_attention(*arrays))
        assert np.isnan(merged[0, 0]).all()
        assert np.isnan(found[0, 0, 0])
        assert (merged[0, 1] == 1).all()
        assert np.isfinite(found[0, 0, 1])


def test_float16_parts_do_not_overflow():
    """The weights' sum may round to more than 1; float32 parts may be too large for the result."""
    lse_a, lse_b = np.random.default_rng(0).standard_normal((2, 4, 5, 9), dtype=np.float32)
    largest = np.full((4, 9, 5, 1), np.finfo(np.float16).max, np.float16)
    with KERNELS.running():
        arrays = map(KERNELS.put, (largest, lse_a, largest, lse_b))
        assert np.array_equal(KERNELS.get(cupyattn.merge_attention(*arrays)[0]), largest)
        wide = largest.astype(np.float32) * 2
        arrays = map(KERNELS.put, (wide, lse_a, wide, lse_b))
        given = KERNELS.put(np.zeros_like(largest)), KERNELS.put(lse_a.copy())
        assert np.isposinf(KERNELS.get(cupyattn.merge_attention(*arrays, out=given)[0])).all()


def test_views_and_given_results():
    """No two arrays have the same strides."""
    arrays = parts((2, 3, 4, 8), "float16")
    with cupyattn.backend("emulator"):
        expected = cupyattn.merge_attention(*arrays)
        out, lse = (
            np.zeros((*x.shape[:2], apart, *x.shape[2:]), x.dtype)
            for apart, x in zip((6, 7), expected, strict=True)
        )
        views = [
            np.repeat(x[:, :, None], apart, axis=2)[:, :, 1] for apart, x in enumerate(arrays, 2)
        ]
        cupyattn.merge_attention(*views, out=(out[:, :, 1], lse[:, :, 1]))
    for given_, right in ((out, expected[0]), (lse, expected[1])):
        assert np.array_equal(given_[:, :, 1], right)
        assert not given_[:, :, 0].any()


@pytest.mark.parametrize(
    ("index", "change", "kind", "message"),
    [
        (0, lambda x: x[0], ValueError, "out_a has shape (3, 4, 8)"),
        (2, lambda x: x[..., :4], ValueError, "out_b has shape (2, 3, 4, 4)"),
        (1, lambda x: x.astype("float16"), TypeError, "lse_a has dtype float16"),
        (3, lambda x: np.swapaxes(x, 1, 2), ValueError, "lse_b has shape (2, 3, 4)"),
        (2, lambda x: x.astype("float64"), TypeError, "out_a has float16, out_b has float64"),
        (
            2,
            lambda x: x.astype(dtype_of("bfloat16")),
            TypeError,
            "share one dtype, or some are float32",
        ),
        (0, lambda x: None, TypeError, "out_a is None"),
    ],
)
def test_refusals(index, change, kind, message):
    arrays = list(parts((2, 3, 4, 8), "float16"))
    arrays[index] = change(arrays[index])
    with pytest.raises(kind, match=re.escape(message)):
        cupyattn.merge_attention(*arrays)


@pytest.mark.parametrize("wide", [False, True])
def test_the_first_part_may_be_the_result(wide):
    out_a, lse_a, out_b, lse_b = parts((2, 3, 4, 40), "float16")
    out_a = out_a.astype(np.float32) if wide else out_a
    with cupyattn.backend("emulator"):
        out, lse = cupyattn.merge_attention(out_a, lse_a, out_b, lse_b)
        assert out.dtype == out_a.dtype
        cupyattn.merge_attention(out_a, lse_a, out_b, lse_b, out=(out_a, lse_a))
    assert np.array_equal(out, out_a)
    assert np.array_equal(lse, lse_a)


def test_a_result_must_not_lie_elsewhere_in_the_inputs():
    out_a, lse_a, out_b, lse_b = parts((2, 3, 4, 8), "float16")
    with pytest.raises(ValueError, match="out overlaps out_b"):
        cupyattn.merge_attention(out_a, lse_a, out_b, lse_b, out=(out_b, lse_a.copy()))
    shifted = np.zeros(out_a.size + 8, np.float16)
    out_a = shifted[:-8].reshape(out_a.shape)
    with pytest.raises(ValueError, match="out overlaps out_a"):
        cupyattn.merge_attention(
            out_a, lse_a, out_b, lse_b, out=(shifted[8:].reshape(out_a.shape), lse_a.copy())
        )


G, GROUP, SIZE = 2, 2, 16


class Continuations:
    """Forks of a prompt of whole blocks, each with a tail whose last tokens are new."""

    def __init__(self, dtype: str, kept: str, blocks: int, tails: list[int], new: int) -> None:
        self.head_dim = head_dim = 24 if dtype == "float32" else 64
        rng, kind = np.random.default_rng(blocks), dtype_of(dtype)
        self.shared = blocks * SIZE
        self.cache = PagedKVCache(1, 64, SIZE, G, head_dim, dtype=kept, xp=KERNELS.xp)
        prompt = self.cache.allocator.add([0] * self.shared)
        sequences = [prompt]
        self._write(rng, kind, sequences, [self.shared])
        sequences += [prompt.fork() for _ in tails[1:]]
        for number, (sequence, tail) in enumerate(zip(sequences, tails, strict=True)):
            self.cache.copy(sequence.append([number] * tail))
        self._write(rng, kind, sequences, tails)
        self.step = self.cache.step_tables(sequences, new)
        shape = (len(tails), new, G * GROUP, head_dim)
        self.q = KERNELS.put(rng.standard_normal(shape).astype(kind))

    def _write(self, rng: Any, kind: Any, sequences: list[Any], counts: list[int]) -> None:
        tables = self.cache.step_tables(sequences, counts)
        tokens = rng.standard_normal((2, sum(counts), G, self.head_dim)).astype(kind)
        self.cache.append(0, *map(KERNELS.put, tokens), tables)

    def cascade(self) -> list[np.ndarray]:
        """Merge out and lse of two calls: over the prompt, and over the tails."""
        columns, (count, new, heads, dim) = self.shared // SIZE, self.q.shape
        caches, scales = (self.cache.k[0], self.cache.v[0]), self.cache.scales(0)
        table, lengths = self.step.block_table, self.step.seqlens_k
        out, lse = cupyattn.paged_attention(
            self.q.reshape(1, count * new, heads, dim), *caches, table[:1, :columns],
            KERNELS.put(np.array([self.shared], np.int32)), return_lse=True, **scales,
        )  # fmt: skip
        prefix = out.reshape(self.q.shape), lse.reshape(heads, count, new).swapaxes(0, 1)
        tails = cupyattn.paged_attention(
            self.q, *caches, table[:, columns:], lengths - self.shared, causal=True,
            return_lse=True, **scales,
        )  # fmt: skip
        return [KERNELS.get(each) for each in cupyattn.merge_attention(*prefix, *tails)]

    def plain(self) -> list[np.ndarray]:
        """Return out and lse of one call."""
        found = self.cache.attend(0, self.q, self.step, causal=True, return_lse=True)
        return [KERNELS.get(each) for each in found]


@pytest.mark.parametrize(
    ("dtype", "kept", "tails", "new"),
    [
        ("float32", "float32", [3, 17, 20], 2),
        *deep(
            ("float32", "int8", [3, 17, 20], 2), ("float32", "float32", [1, 40, 9], 1),
            ("float32", "int4", [2] * 10, 2),
            ("float16", "float16", [4, 40, 9, 5], 4), ("float32", "float32", [40, 4], 4),
            ("float32", "int4", [3, 17, 20], 2), ("float32", "int8", [2] * 10, 2),
        ),
    ],
)  # fmt: skip
def test_a_cascade_is_plain_attention(dtype, kept, tails, new):
    """Where the prompt has more than 16 queries, another kernel attends to it."""
    problem = Continuations(dtype, kept, 3, tails, new)
    with KERNELS.running():
        found, expected = problem.cascade(), problem.plain()
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 if dtype == "float32" else 4e-3)
    problem.step.seqlens_k[-1] -= 1
    with KERNELS.running():
        assert not np.allclose(problem.cascade()[0], expected[0], atol=1e-2), "a token is missed"
