"""Paged attention over caches of integers: against the reference on them, within their bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paged import PagedProblem, multiprocessors, on_emulator, on_kernels, paged_problems
from support.search import deep, examples, mostly_deep, wider

import cupyattn
from cupyattn import reference
from cupyattn.reference.attention.quantised import quantisation_error
from cupyattn.reference.kv_cache.quantisation import dequantise, quantise

pytestmark = pytest.mark.nvrtc

BITS = (8, 4)
KERNELS = wider(
    # Tensor cores with one tile ahead or two, and lanes whose loads are whole words.
    (("float16", 64, 4, 2), ("float32", 24, 4, 1)),
    (
        ("float16", 64, 16, 16), ("float16", 128, 8, 2), ("float16", 128, 16, 16),
        ("float16", 256, 8, 3), ("float16", 80, 4, 2), ("float16", 34, 3, 5),
        ("bfloat16", 128, 8, 2), ("bfloat16", 2, 3, 3), ("float32", 256, 2, 3),
        ("float32", 128, 8, 1), ("float32", 62, 2, 2),
    ),
)  # fmt: skip


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data(), count=st.integers(1, 4))
@examples(4)
def test_within_the_bound_of_the_integers(bits: int, data: st.DataObject, count: int):
    """Whatever the lengths are, wherever blocks lie and shares cut; unused scales are NaN."""
    problem = data.draw(paged_problems(KERNELS, bits))
    arrays = problem.arrays()
    with multiprocessors(count):
        out, lse = on_kernels(problem, arrays)
    assert problem.ratio(out, lse, arrays) <= 1


def test_the_bias_of_four_bits_shows_beside_a_value_that_is_0():
    """The other token's scale is 5,000 times as large, and eight times it is taken off again."""
    problem = PagedProblem(
        lengths=(2,), Sq=1, G=2, group=4, D=64, dtype="float16", block_size=16, bits=4
    )
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


RAGGED = PagedProblem(
    lengths=(0, 300, 7, 64, 129), Sq=3, G=2, group=2, D=64, dtype="float16",
    options=(("causal", True),), bits=4,
)  # fmt: skip
EVERY_OPTION = (
    ("causal", True), ("alibi_slopes", True), ("softcap", 5.0), ("sinks", True),
    ("window_size", (37, None)),
)  # fmt: skip


@pytest.mark.parametrize("bits", mostly_deep(BITS, [4]))
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32"], ["float16"]))
def test_options(dtype, bits):
    problem = replace(RAGGED, dtype=dtype, bits=bits, options=EVERY_OPTION)
    arrays = problem.arrays()
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize("bits", mostly_deep(BITS, [4]))
@pytest.mark.parametrize("dtype", mostly_deep(["float16", "float32"], ["float16"]))
def test_rows_that_are_not_aligned_are_read_byte_by_byte(dtype, bits):
    problem = replace(RAGGED, dtype=dtype, bits=bits, Sq=1, G=1)
    q, k, *others = arrays = problem.arrays()
    odd = np.zeros(k.size + 1, k.dtype)[1:].reshape(k.shape)
    odd[...] = k
    assert problem.ratio(*on_kernels(problem, (q, odd, *others)), arrays) <= 1


def test_views_of_a_pool_of_layers_without_copies():
    """Layers, K and V in one array, heads before slots; scales of all heads side by side."""
    arrays = q, k, v, table, lengths, k_scales, v_scales = RAGGED.arrays()
    expected = on_emulator(RAGGED, arrays)
    blocks, size, heads, width = k.shape
    pool = np.full((2, blocks, 3, heads, size, width), 255, k.dtype)
    pool[:, :, 1] = np.stack((k, v)).swapaxes(2, 3)
    packed = [np.ascontiguousarray(scales)[:, ::-1][:, ::-1] for scales in (k_scales, v_scales)]
    views = pool[:, :, 1].swapaxes(2, 3)
    found = on_emulator(RAGGED, (q, views[0], views[1], table, lengths, *packed))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("least", [-40, *deep(-120)])
def test_scales_of_any_size(least, bits):
    """Of V from 2**least to 2**12, anywhere in a sequence: weights stay within float16."""
    problem = replace(RAGGED, bits=bits)
    arrays = problem.arrays()
    powers = np.random.default_rng(3).integers(least, 12, arrays[6].shape)
    arrays = (*arrays[:6], arrays[6] * np.exp2(powers).astype(np.float32))
    assert problem.ratio(*on_kernels(problem, arrays), arrays) <= 1


@pytest.mark.parametrize(("which", "value"), [(5, np.nan), (6, np.nan), (6, np.inf)])
def test_scales_that_are_not_finite_stay_in_their_sequence(which, value):
    arrays = RAGGED.arrays()
    arrays[which][arrays[3][2, 0], 0] = value  # a token of sequence 2
    out, _ = on_kernels(RAGGED, arrays)
    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_integers_of_zero_scales_count_as_zero():
    arrays = RAGGED.arrays()
    for scales in arrays[5:]:
        scales[...] = 0
    out, lse = on_kernels(RAGGED, arrays)
    assert not out.any()
    assert np.allclose(lse[1, :, -1], np.log(300))


def test_the_cpu_path_is_that_of_dequantised_caches():
    arrays = q, k, v, table, lengths, k_scales, v_scales = replace(RAGGED, dtype="float32").arrays()
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    found = cupyattn.paged_attention(*arrays[:5], **scales, causal=True)
    caches = dequantise(k, k_scales), dequantise(v, v_scales)
    expected = cupyattn.paged_attention(q.astype("float64"), *caches, table, lengths, causal=True)
    assert np.array_equal(found, expected.astype(np.float32))


@given(
    bits=st.sampled_from(BITS),
    keys=st.integers(1, 80),
    options=st.sampled_from(
        ({}, {"sinks": np.array([0.3, -1.0])}, {"softcap": 2.0}, {"window_size": (20, 0)})
    ),
    size=st.sampled_from((0.1, 0.5, 1.0)),
    seed=st.integers(0, 2**16),
)
@examples(27)
def test_what_the_format_costs_is_bounded(bits, keys, options, size, seed):
    """Exact attention over what was stored, beside that over what was given."""
    rng = np.random.default_rng(seed)
    q = size * rng.standard_normal((2, 3, 2, 16))
    k, v = rng.standard_normal((2, 2, keys, 1, 16))
    stored = (dequantise(*quantise(x, bits)) for x in (k, v))
    found = reference.attention(q, *stored, **options)
    exact = reference.attention(q, k, v, **options)
    with np.errstate(invalid="ignore"):
        errors = [np.abs(a - b) for a, b in zip(found, exact, strict=True)]
    bounds = quantisation_error(q, k, v, bits, **options)
    for error, bound in zip(errors, bounds, strict=True):
        seen = ~np.isnan(error)  # rows without keys have a lse of -inf, twice
        assert (error[seen] <= bound[seen] + 1e-12).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 40), (4, 120)])
def test_the_bound_of_the_format_is_not_far_from_what_is_measured(bits, most):
    """Errors of D items cancel where the bound adds them up, and it is an exponential of these."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 200, 4, 32))
    found, _ = reference.attention(q, *(dequantise(*quantise(x, bits)) for x in (k, v)))
    error = np.abs(found - reference.attention(q, k, v)[0]).max()
    bound = quantisation_error(q, k, v, bits)[0].max()
    assert error <= bound <= most * error
