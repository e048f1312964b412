"""Options at the end of what float32 arithmetic has digits for: right, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from support.devices import KERNELS

import cupyattn
from cupyattn import reference

pytestmark = pytest.mark.nvrtc

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 1, 70, 2, 16)).astype(np.float32)


def error_ratio(dtype: str, **options) -> float:
    """The largest error of out and lse over its bound."""
    arrays = [array.astype(dtype) for array in (Q, K, V)]
    exact = reference.attention(*arrays, **options)
    bounds = reference.attention_bound(*arrays, dtype=arrays[0].dtype, tile_k=16, **options)
    placed = {
        name: KERNELS.put(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    with KERNELS.running():
        found = cupyattn.attention(*map(KERNELS.put, arrays), **placed, return_lse=True)
    return max(map(reference.error_ratio, map(KERNELS.get, found), exact, bounds))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sink", [2e38, 1e10, -3e38, -np.inf])
def test_sinks_of_any_size_that_is_allowed(dtype, sink):
    assert error_ratio(dtype, sinks=np.full(2, sink, np.float32)) <= 1


@pytest.mark.parametrize("sink", [2.1e38, 3e38, np.inf])
@pytest.mark.parametrize("name", ["reference", "emulator"])
def test_sinks_beyond_are_refused(sink, name):
    sinks = np.array([1, sink], np.float32)
    with cupyattn.backend(name), pytest.raises(ValueError, match=r"sinks has .*at most 2e\+38"):
        cupyattn.attention(Q, K, V, sinks=sinks)


@pytest.mark.gpu
def test_sinks_beyond_are_refused_on_a_gpu_that_checks_values():
    arrays = map(KERNELS.put, (Q, K, V))
    sinks = KERNELS.put(np.array([1, 3e38], np.float32))
    with cupyattn.backend(checks=True), pytest.raises(ValueError, match="sinks has values up to"):
        cupyattn.attention(*arrays, sinks=sinks)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_softcap_is_within_its_bound(dtype):
    assert error_ratio(dtype, softcap=10_000.0) <= 1


@pytest.mark.parametrize("softcap", [10_001, 1e30, np.inf])
def test_larger_softcaps_are_refused(softcap):
    with pytest.raises(ValueError, match=r"softcap = .* at most 10000"):
        cupyattn.attention(Q, K, V, softcap=softcap)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("q_offset", [2**20, 2**24, 2**24 + 1, -(2**24) - 3])
def test_alibi_far_from_the_keys_is_within_its_bound(dtype, q_offset):
    """Its slope small: the distances, not the size of the scores, are what could lose digits."""
    slopes = np.array([2.0**-20, 2.0**-24], np.float32)
    assert error_ratio(dtype, alibi_slopes=slopes, q_offset=q_offset) <= 1
