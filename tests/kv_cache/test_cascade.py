"""Continuations of one prompt attend to it once, together, and to their tails: merged, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.devices import KERNELS
from support.dtypes import dtype_of
from support.search import deep, examples, wider

import cupyattn
from cupyattn import PagedKVCache, reference

pytestmark = pytest.mark.nvrtc

G, GROUP, SIZE = 2, 2, 16
KERNEL_DTYPES = wider((("float16", 64), ("float32", 24)), (("float16", 128), ("bfloat16", 40)))


class Continuations:
    """`count` forks of a prompt of whole blocks, each with a tail whose last tokens are new."""

    def __init__(
        self, dtype: str, head_dim: int, kept: str, blocks: int, tails: list[int], new: int
    ) -> None:
        rng, kind = np.random.default_rng(blocks), dtype_of(dtype)
        self.shared, self.new, self.count = blocks * SIZE, new, len(tails)
        lengths = [self.shared + tail for tail in tails]
        self.cache = PagedKVCache(1, 64, SIZE, G, head_dim, dtype=kept, xp=KERNELS.xp)
        prompt = self.cache.allocator.add([0] * self.shared)
        self.prefix = rng.standard_normal((2, self.shared, G, head_dim)).astype(kind)
        self.cache.append(
            0, *map(KERNELS.put, self.prefix), self.cache.step_tables([prompt], self.shared)
        )
        self.sequences = [prompt, *(prompt.fork() for _ in tails[1:])]
        for number, (sequence, length) in enumerate(zip(self.sequences, lengths, strict=True)):
            self.cache.copy(sequence.append([number] * (length - self.shared)))
        self.tails = [rng.standard_normal((2, tail, G, head_dim)).astype(kind) for tail in tails]
        together = np.concatenate(self.tails, axis=1)
        self.cache.append(
            0, *map(KERNELS.put, together), self.cache.step_tables(self.sequences, tails)
        )
        self.step = self.cache.step_tables(self.sequences, new)
        shape = (self.count, new, G * GROUP, head_dim)
        self.q = rng.standard_normal(shape).astype(kind)

    def cascade(self) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse of the two calls and their merging."""
        columns, (count, new, heads, dim) = self.shared // SIZE, self.q.shape
        caches, scales = (self.cache.k[0], self.cache.v[0]), self.cache.scales(0)
        table, lengths = self.step.block_table, self.step.seqlens_k
        q = KERNELS.put(self.q)
        out, lse = cupyattn.paged_attention(
            q.reshape(1, count * new, heads, dim), *caches, table[:1, :columns],
            KERNELS.put(np.array([self.shared], np.int32)), return_lse=True, **scales,
        )  # fmt: skip
        prefix = out.reshape(q.shape), lse.reshape(heads, count, new).swapaxes(0, 1)
        tails = cupyattn.paged_attention(
            q, *caches, table[:, columns:], lengths - self.shared, causal=True, return_lse=True,
            **scales,
        )  # fmt: skip
        merged, lse = cupyattn.merge_attention(*prefix, *tails)
        return KERNELS.get(merged), KERNELS.get(lse)

    def plain(self) -> tuple[np.ndarray, np.ndarray]:
        """Out and lse of one call."""
        out, lse = self.cache.attend(
            0, KERNELS.put(self.q), self.step, causal=True, return_lse=True
        )
        return KERNELS.get(out), KERNELS.get(lse)


def bounded(problem: Continuations, dtype: str, found: Any) -> float:
    """The largest error over its bound: of each part, of the weights by both lse, of merging."""
    worst = 0.0
    for row, tail in enumerate(problem.tails):
        q = problem.q[row : row + 1]
        whole = [np.concatenate(each)[None] for each in zip(problem.prefix, tail, strict=True)]
        exact, parts, bounds = reference.attention(q, *whole, causal=True), [], []
        for keys, causal in ((problem.prefix, False), (tail, True)):
            k, v = keys[0][None], keys[1][None]
            parts += reference.attention(q, k, v, causal=causal)
            bounds.append(reference.attention_bound(q, k, v, dtype=dtype, tile_k=16, causal=causal))
        (out_a, lse_a), (out_b, lse_b) = bounds
        rounded = [part.astype(q.dtype) if i % 2 == 0 else part for i, part in enumerate(parts)]
        out_bound, lse_bound = reference.merge_attention_bound(*rounded)
        of_parts, _ = reference.merge_attention(out_a, parts[1], out_b, parts[3])
        size, _ = reference.merge_attention(abs(parts[0]), parts[1], abs(parts[2]), parts[3])
        weights = 2 * np.swapaxes(lse_a + lse_b, 1, 2)[..., None]
        out_bound = 1.01 * (out_bound + of_parts + weights * size)
        lse_bound = 1.01 * (lse_bound + np.maximum(lse_a, lse_b))
        here = [each[row : row + 1] for each in found]
        for result, right, bound in zip(here, exact, (out_bound, lse_bound), strict=True):
            worst = max(worst, reference.error_ratio(result, right, bound))
    return worst


@given(
    kernel=st.sampled_from(KERNEL_DTYPES),
    blocks=st.integers(1, 4),
    tails=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    new=st.integers(1, 4),
)
@examples(6)
def test_a_cascade_is_plain_attention(kernel, blocks, tails, new):
    """Up to 28 queries of the prompt: those of few and of many query tokens."""
    dtype, head_dim = kernel
    problem = Continuations(dtype, head_dim, dtype, blocks, [max(new, t) for t in tails], new)
    with KERNELS.running():
        found = problem.cascade()
    assert bounded(problem, dtype, found) <= 1


@pytest.mark.parametrize(
    ("kept", "tails"),
    [
        *(("int8", [3, 17, 20]), ("int4", [2] * 10)),
        *deep(("int4", [3, 17, 20]), ("int8", [2] * 10)),
    ],
)
def test_of_integers_too(kept, tails):
    """Where the prompt has more than 16 queries it becomes floats first, otherwise it does not."""
    problem = Continuations("float32", 24, kept, 3, tails, 2)
    with KERNELS.running():
        found, plain = problem.cascade(), problem.plain()
    for a, b in zip(found, plain, strict=True):
        assert np.allclose(a, b, atol=1e-5)


def test_a_part_that_is_missed_is_found():
    problem = Continuations("float32", 24, "float32", 2, [5, 9], 1)
    problem.step.seqlens_k[1] -= 1
    assert bounded(problem, "float32", problem.cascade()) > 1
