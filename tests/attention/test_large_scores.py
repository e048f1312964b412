"""Gradients of scores so large that rounding lse to float32 changes the probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from support.backward_runs import GRADIENTS, run
from support.devices import KERNELS
from support.search import mostly_deep

import cupyattn
from cupyattn import reference
from cupyattn.distributed import ring_attention, ring_attention_backward
from cupyattn.distributed import run as run_ranks

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

BOTH_MODES = pytest.mark.parametrize("deterministic", [False, True])


def normal_arrays(std: float, head_dim: int, dtype: str, tokens: int = 64) -> list[np.ndarray]:
    """Arrays dout, q, k, v (1, tokens, 2, head_dim), with q and k of a standard deviation."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((4, 1, tokens, 2, head_dim))
    return list((arrays * np.array([1, std, std, 1])[:, None, None, None, None]).astype(dtype))


def check_against_exact(arrays: list[np.ndarray], deterministic: bool, dtype: str) -> None:
    """Compare with the gradients of the exact float64 lse: the bound contains its rounding."""
    out, lse = reference.attention(*arrays[1:])
    out = out.astype(dtype)
    grads = run((*arrays, out, lse.astype(np.float32)), {}, "flash", deterministic=deterministic)
    exact = reference.attention_backward(*arrays, out, lse)
    bounds = reference.attention_backward_bound(*arrays, out, lse, dtype=dtype)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(bounds, name)).all(), name
        assert np.isfinite(grads[name]).all(), name
        ratio = reference.error_ratio(grads[name], getattr(exact, name), getattr(bounds, name))
        assert ratio <= 1, (name, ratio)


@BOTH_MODES
@pytest.mark.parametrize("head_dim", mostly_deep([8, 40, 64, 128, 136, 256], [64, 256]))
@pytest.mark.parametrize("value", [1000, 1250, 1500, 1750, 3000])
def test_probability_of_a_single_key_is_at_most_one(value, head_dim, deterministic):
    """With one key P is 1, and dv is dout: 1."""
    x = np.full((1, 1, 1, head_dim), value, np.float16)
    ones = np.ones_like(x)
    placed = tuple(map(KERNELS.put, (x, x, ones)))
    out, lse = map(KERNELS.get, cupyattn.attention(*placed, return_lse=True))
    grads = run((ones, x, x, ones, out, lse), {}, "flash", deterministic=deterministic)
    assert (grads["dv"] >= 0).all()
    assert (grads["dv"] <= 1).all()
    assert all(np.isfinite(gradient).all() for gradient in grads.values())
    check_against_exact([ones, x, x, ones], deterministic, "float16")


@BOTH_MODES
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32", "bfloat16"], ["float16"]))
@pytest.mark.parametrize("head_dim", mostly_deep([8, 64, 136, 256], [64, 136]))
@pytest.mark.parametrize("std", [75.0, 1500.0])
def test_large_random_scores_are_within_the_bound(std, head_dim, dtype, deterministic):
    check_against_exact(normal_arrays(std, head_dim, dtype), deterministic, dtype)


@pytest.mark.parametrize(
    "options", [{"softcap": 1e4}, {"causal": True}, {"dropout_p": 0.5, "seed": 3}]
)
def test_large_scores_with_options_give_finite_gradients(options):
    dout, q, k, v = normal_arrays(1500.0, 64, "float16")
    out, lse = reference.attention(q, k, v, **options)
    arrays = dout, q, k, v, out.astype(np.float16), lse.astype(np.float32)
    grads = run(arrays, options, "flash")
    assert all(np.isfinite(gradient).all() for gradient in grads.values())
    kept = 2 if "dropout_p" in options else 1
    assert (np.abs(grads["dv"]) <= kept * 1.01 * np.abs(dout.astype(float)).sum(1)).all()


@BOTH_MODES
def test_packed_sequences_have_the_gradients_of_dense_ones(deterministic):
    dout, q, k, v = normal_arrays(1500.0, 64, "float16", tokens=100)
    bounds, lengths = np.array([0, 36, 100], np.int32), (slice(0, 36), slice(36, 100))
    parts = [reference.attention(q[:, at], k[:, at], v[:, at]) for at in lengths]
    out = np.concatenate([part for part, _ in parts], 1)[0].astype(np.float16)
    lse = np.concatenate([part for _, part in parts], 2)[0].astype(np.float32)
    rows = [KERNELS.put(x[0]) for x in (dout, q, k, v)]
    placed = [KERNELS.put(x) for x in (out, lse, bounds, bounds)]
    grads = cupyattn.attention_varlen_backward(*rows, *placed, 64, 64, deterministic=deterministic)
    found = {name: KERNELS.get(getattr(grads, name)) for name in GRADIENTS[:3]}
    for at in lengths:
        arrays = dout[:, at], q[:, at], k[:, at], v[:, at], out[None, at], lse[None, :, at]
        exact = reference.attention_backward(*arrays)
        limits = reference.attention_backward_bound(*arrays, dtype="float16")
        for name, gradient in found.items():
            part = gradient[None, at], getattr(exact, name), getattr(limits, name)
            assert reference.error_ratio(*part) <= 1, name


def test_ring_of_two_ranks_gives_finite_gradients():
    dout, q, k, v = normal_arrays(1500.0, 64, "float16")

    def of_rank(group):
        shard = slice(32 * group.rank, 32 * group.rank + 32)
        mine = [KERNELS.put(np.ascontiguousarray(x[:, shard])) for x in (dout, q, k, v)]
        given = {"group": group, "placement": "contiguous"}
        out, lse = ring_attention(*mine[1:], return_lse=True, **given)
        grads = ring_attention_backward(*mine, out, lse, **given)
        return [KERNELS.get(x) for x in (grads.dq, grads.dk, grads.dv)]

    parts = run_ranks(of_rank, 2, timeout=120)
    dq, dk, dv = (np.concatenate(each, 1) for each in zip(*parts, strict=True))
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    assert (np.abs(dv) <= 1.01 * np.abs(dout.astype(float)).sum(1)).all()
