"""Attention at the lengths of real use, which only a GPU is fast enough for."""

from __future__ import annotations

import numpy as np
import pytest

import cupyattn
from cupyattn import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 1024, 4096])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_unit_normal_float16_errs_by_less_than_a_thousandth(head_dim, length, causal):
    import cupy

    rng = np.random.default_rng(head_dim + length)
    q, k, v = rng.standard_normal((3, 1, length, 2, head_dim)).astype(np.float16)
    out = cupyattn.attention(*map(cupy.asarray, (q, k, v)), causal=causal)
    expected, _ = reference.attention(q, k, v, causal=causal)
    assert abs(cupy.asnumpy(out) - expected).max() < 1e-3


def test_131072_tokens_take_the_results_and_no_more():
    """The rows that are looked at see all keys, and only the first half of them."""
    import cupy

    length, head_dim = 131_072, 128
    q, k, v = (
        cupy.random.default_rng(seed).standard_normal((1, length, 1, head_dim)).astype(np.float16)
        for seed in range(3)
    )
    small = q[:, :64]
    cupyattn.attention(small, small, small, causal=True, return_lse=True)  # loads the kernel
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    out, lse = cupyattn.attention(q, k, v, causal=True, return_lse=True)
    assert pool.total_bytes() - before <= out.nbytes + lse.nbytes + 1024

    rows = [length // 2 - 1, length - 1]
    host_k, host_v = cupy.asnumpy(k), cupy.asnumpy(v)
    for row in rows:
        seen = slice(0, row + 1)
        expected, expected_lse = reference.attention(
            cupy.asnumpy(q[:, row : row + 1]), host_k[:, seen], host_v[:, seen]
        )
        np.testing.assert_allclose(cupy.asnumpy(out[:, row]), expected[:, 0], atol=1e-4)
        np.testing.assert_allclose(cupy.asnumpy(lse[..., row]), expected_lse[..., 0], atol=1e-4)
