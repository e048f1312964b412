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


# With 70 queries and keys, the nearest key of the last query is as far away as q_offset says, and
# so is that of the first query where q_offset is below 0; the furthest keys are 69 away, or as a
# window says.
AT_THE_LIMIT = [
    (0.5, {"q_offset": 2**21}),
    (0.5, {"q_offset": -(2**21)}),
    (0.5, {"q_offset": 2**21 - 30, "seqused_k": np.array([40])}),
    (0.5, {"q_offset": np.array([2**21])}),
    (-0.5, {"q_offset": 2**21 - 69}),
    (-15_196.0, {}),
    (-116_508.0, {"window_size": (9, 0)}),
    (1e30, {}),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("slope", "options"), AT_THE_LIMIT)
def test_alibi_at_its_limit_is_within_its_bound(dtype, slope, options):
    assert error_ratio(dtype, alibi_slopes=np.full(2, slope, np.float32), **options) <= 1


@pytest.mark.parametrize("name", ["reference", "emulator"])
@pytest.mark.parametrize(("slope", "options"), AT_THE_LIMIT[:-1])
def test_alibi_beyond_its_limit_is_refused(slope, options, name):
    """A GPU's result would be off by as much as it is large: 0.14 at 8 times as far."""
    slopes = np.array([0, slope * (1 + 2**-10)], np.float32)
    for call in (
        lambda: cupyattn.attention(Q, K, V, alibi_slopes=slopes, **options),
        lambda: cupyattn.attention(Q, K, V, alibi_slopes=slopes[None], **options),
        lambda: cupyattn.attention_backward(
            Q, Q, K, V, Q, np.zeros((1, 2, 70), np.float32), alibi_slopes=slopes, **options
        ),
    ):
        with cupyattn.backend(name), pytest.raises(ValueError, match="at most 1,048,576: larger"):
            call()


def test_alibi_of_packed_and_paged_sequences_is_refused_too():
    slopes, message = np.full(2, -0.5, np.float32), "alibi_slopes times distances come to "
    packed, bounds = Q[0], np.array([0, 30, 70], np.int32)
    with pytest.raises(ValueError, match=message):
        cupyattn.attention_varlen(
            packed, packed, packed, bounds, bounds, 40, 40, alibi_slopes=slopes, q_offset=2**22
        )
    cache, table = np.zeros((1, 16, 2, 16), np.float32), np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match=message):
        cupyattn.paged_attention(
            Q[:, :1], cache, cache, table, np.array([16]), alibi_slopes=slopes * 2**18
        )


def test_alibi_of_float64_reaches_further():
    arrays, slopes = [x.astype(float) for x in (Q, K, V)], np.full(2, 0.5)
    near = cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=70)
    far = cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=2**24)
    np.testing.assert_allclose(far, near, atol=1e-7)
    with pytest.raises(ValueError, match="at most 562,949,953,421,312: larger scores"):
        cupyattn.attention(*arrays, alibi_slopes=slopes, q_offset=2**51)


def test_alibi_may_be_infinite_or_nan_as_it_is():
    for slope in (np.inf, np.nan):
        slopes = np.full(2, slope, np.float32)
        with np.errstate(invalid="ignore"):
            assert np.isnan(cupyattn.attention(Q, K, V, alibi_slopes=slopes)).all()
    with pytest.raises(ValueError, match="come to inf"):
        cupyattn.attention(Q, K, V, alibi_slopes=np.full(2, np.inf, np.float32), q_offset=90)
