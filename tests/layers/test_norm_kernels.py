"""The norms' kernels against the float64 reference, within its derived bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS
from support.norm_problems import (
    NormProblem,
    backward_ratios,
    forward_ratios,
    norm_problems,
    ratios,
)
from support.search import deep, examples

import cupyattn
from cupyattn import LayerNormGrads, RMSNormGrads, reference
from cupyattn.kernels.configs.layers.norms import BACKWARD_ROWS, FORWARD_ROWS

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

LAYER, RMS = True, False
ALL = ("weight", "bias", "residual")
KINDS = (
    ("float16", LAYER, ALL),
    ("float32", LAYER, ("weight",)),
    ("float32", RMS, ("weight", "residual")),
    ("bfloat16", RMS, ()),
)

# Every row of both tables, with vector and scalar loads: rows enough for CTAs to walk over them.
CASES = [
    (150, 1, "float32", LAYER, ("weight", "bias")),
    (150, 24, "float16", RMS, ("weight", "residual")),
    (70, 129, "bfloat16", LAYER, ALL),
    (37, 768, "float16", LAYER, ("weight", "bias")),
    (37, 1000, "float32", RMS, ()),
    (19, 1032, "bfloat16", RMS, ("weight", "residual")),
    (11, 2056, "float16", LAYER, ("weight", "bias")),
    (11, 4100, "float32", LAYER, ALL),
    (5, 8200, "float16", RMS, ("weight", "bias")),
    (5, 16_400, "float32", LAYER, ALL),
    (3, 16_385, "float16", LAYER, ("weight",)),  # read twice, with one item in its last strip
]
LIMITS = sorted({limit for rows in (FORWARD_ROWS, BACKWARD_ROWS) for limit in rows[75] if limit})
STEPS = (-8, -1, 0, 8)
# Half of the kinds at each step, the other half there at the next limit.
AROUND = [
    (9, limit + step, dtype, centred, arrays)
    for i, limit in enumerate(LIMITS)
    for j, step in enumerate(STEPS)
    for dtype, centred, arrays in KINDS[(i + j) % 2 :: 2]
] + [(3, 65_536, "float16", LAYER, ALL), (2, 200_000, "float32", RMS, ALL)]


@pytest.mark.parametrize(("rows", "length", "dtype", "centred", "arrays"), [*CASES, *deep(*AROUND)])
def test_every_row_of_the_tables(rows, length, dtype, centred, arrays):
    arrays = arrays if centred else tuple(name for name in arrays if name != "bias")
    problem = NormProblem((rows, 1, length), dtype, centred, arrays, weight_offset=1.0 - centred)
    found = ratios(problem)
    assert max(found.values()) <= 1, found


@examples(11)
@given(norm_problems(kinds=KINDS, lengths=st.sampled_from((0, 1, 7, 24, 40, 128))))
def test_within_bounds_of_the_reference(problem: NormProblem):
    found = ratios(problem)
    assert max(found.values()) <= 1, found


@examples(8)
@given(
    norm_problems(
        kinds=KINDS[:2], lengths=st.sampled_from((24, 40)), views=("transposed", "reversed")
    )
)
def test_views_give_what_copies_give(problem: NormProblem):
    """Bit for bit, but for rows that cannot be read in vectors: those add in another order."""
    copy = replace(problem, view="contiguous")
    for view_result, copy_result in zip(problem.forward(), copy.forward(), strict=True):
        assert_array_equal(view_result, copy_result)
    forward = copy.forward()[1:]
    for view_result, copy_result in zip(
        problem.backward(*forward), copy.backward(*forward), strict=True
    ):
        if view_result is not None and view_result.ndim > 1:  # sums are in another order
            assert_array_equal(KERNELS.get(view_result), KERNELS.get(copy_result))


@pytest.mark.parametrize("length", [100, 2056, 16_400])
def test_a_large_mean_beside_a_small_variance(length):
    """Mean 1e4, variance 1e-4: seven digits of x hold four of the deviations, and all count."""
    problem = NormProblem((5, 1, length), mean=1e4, spread=1e-2, eps=0.0)
    found = problem.forward()
    assert max(forward_ratios(problem, found).values()) <= 1
    x = problem.array("x").astype(np.float64)
    exact = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    assert np.abs(found[0] - exact).max() < 1e-4
    gradients = problem.backward(*found[1:])
    assert max(backward_ratios(problem, *found[1:], gradients).values()) <= 1
    statistics = {"mean": x.mean(-1), "rstd": 1 / x.std(-1)}  # not as float32 rounds them
    right, _, _ = reference.norm_backward(problem.array("dout"), x, **statistics)
    assert np.abs(KERNELS.get(gradients.dx) - right).max() < 1e-5 * np.abs(right).max()


def test_an_outlier_beside_a_small_variance():
    problem = NormProblem((3, 1, 768), spread=1e-3, eps=0.0)
    x = KERNELS.put(np.where(np.arange(768) == 0, 1e3, problem.array("x")).astype(np.float32))
    out, mean, rstd = map(KERNELS.get, cupyattn.layer_norm(x, eps=0.0, return_stats=True))
    found = forward_ratios(problem, (out, KERNELS.get(x), mean, rstd))
    assert max(found.values()) <= 1, found


@pytest.mark.parametrize("length", [24, 1000, 20_000])
def test_rows_that_are_constant_zero_or_not_finite(length):
    x = np.random.default_rng(0).standard_normal((6, length)).astype(np.float32)
    x[0], x[1] = 0, 1234.567
    x[2, length // 2], x[3, 0], x[4, -1] = np.nan, np.inf, -np.inf
    weight = np.full(length, 2, np.float32)
    placed = KERNELS.put(x), KERNELS.put(weight)
    out, mean, rstd = map(KERNELS.get, cupyattn.layer_norm(*placed, return_stats=True))
    assert not out[0].any()
    assert np.abs(out[1]).max() < 1e-3
    np.testing.assert_allclose(rstd[:2], 1e-5**-0.5, rtol=1e-5)
    np.testing.assert_allclose(mean[:2], [0, 1234.567], rtol=1e-6)
    for each in (out, mean, rstd):
        assert np.isnan(each[2:5]).all()
        assert np.isfinite(each[5]).all()
    out = KERNELS.get(cupyattn.rms_norm(*placed))
    assert not out[0].any()
    np.testing.assert_allclose(out[1], 2, rtol=1e-5)
    assert np.isnan(out[2]).all()
    assert [np.isnan(row).sum() for row in out[3:]] == [1, 1, 0]  # inf / inf, and 0 / inf


@pytest.mark.parametrize("norm", [cupyattn.layer_norm, cupyattn.rms_norm])
def test_squares_that_leave_float32(norm):
    """As the documentation says: zeros for what is too large, eps alone for what is too small."""
    x = np.tile(np.array([[-1, 1]], np.float32), 32)
    with cupyattn.backend("emulator"):
        found = {size: norm(x * np.float32(size), eps=0.0) for size in (1e18, 1e-18, 3e19)}
        tiny = norm(x * np.float32(4e-20), eps=2e-38)
    for size in (1e18, 1e-18):
        np.testing.assert_allclose(found[size], norm(x, eps=0.0), rtol=1e-5)
    assert_array_equal(found[3e19], np.zeros((1, 64)))
    expected = x * (4e-20 / 2e-38**0.5)  # 4% less with the mean square, 1.6e-39
    np.testing.assert_allclose(tiny, expected, rtol=1e-2)


def test_a_sum_that_leaves_float32_gives_nan():
    """As the documentation of layer_norm says."""
    x = KERNELS.put(np.full((1, 64), 1e38, np.float32))
    assert np.isnan(KERNELS.get(cupyattn.layer_norm(x))).all()


def test_no_items_in_a_row_and_no_rows():
    out, mean, rstd = cupyattn.layer_norm(
        KERNELS.put(np.zeros((3, 0), np.float32)), eps=0.25, return_stats=True
    )
    assert out.shape == (3, 0)
    assert_array_equal(KERNELS.get(mean), np.zeros(3))
    assert_array_equal(KERNELS.get(rstd), np.full(3, 2))
    none = KERNELS.put(np.zeros((0, 24), np.float32))
    weight, empty = KERNELS.put(np.ones(24, np.float32)), KERNELS.put(np.zeros(0, np.float32))
    grads = cupyattn.layer_norm_backward(none, none, weight, empty, empty, bias=weight)
    assert grads.dx.shape == (0, 24)
    assert not KERNELS.get(grads.dweight).any()
    assert not KERNELS.get(grads.dbias).any()


def test_gradients_are_the_same_from_run_to_run_and_may_be_added_to():
    problem = NormProblem((37, 1, 40), "float16", LAYER, ALL)
    _, *saved = problem.forward()
    first, second = (problem.backward(*saved) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert KERNELS.get(one).tobytes() == KERNELS.get(other).tobytes()
    there = LayerNormGrads(*(KERNELS.put(np.full(g.shape, 2, g.dtype)) for g in first))
    added = problem.backward(*saved, grads=there, accumulate=True)
    for one, other, given_array in zip(first, added, there, strict=True):
        assert other is given_array
        np.testing.assert_allclose(
            KERNELS.get(other).astype(np.float64), KERNELS.get(one) + 2.0, rtol=2e-3, atol=4e-3
        )
    anew = problem.backward(*saved, grads=LayerNormGrads(dweight=there.dweight), accumulate=True)
    assert_array_equal(KERNELS.get(anew.dx), KERNELS.get(first.dx))


def test_workspace_and_grads_given():
    problem = NormProblem((37, 1, 40), "float32", RMS, ("weight",))
    _, *saved = problem.forward()
    expected = problem.backward(*saved)
    grads = RMSNormGrads(*(KERNELS.put(np.full(g.shape, 7, g.dtype)) for g in expected))
    with pytest.raises(ValueError, match=r"workspace has 8 bytes; this call needs \d+"):
        problem.backward(*saved, grads=grads, workspace=KERNELS.put(np.zeros(8, np.uint8)))
    room = KERNELS.put(np.zeros(2**16, np.uint8))
    found = problem.backward(*saved, grads=grads, workspace=room)
    for one, other, given_array in zip(expected, found, grads, strict=True):
        assert other is given_array
        assert_array_equal(KERNELS.get(one), KERNELS.get(other))


@pytest.mark.parametrize("length", [40, 16_400])
def test_in_place(length):
    """out may be x and the sum the residual: the backward takes it from there."""
    problem = NormProblem((5, 1, length), "float16", LAYER, ALL)
    expected = problem.forward()
    x, residual, weight, bias = (
        KERNELS.put(problem.array(name)) for name in ("x", "residual", "weight", "bias")
    )
    out, total = cupyattn.layer_norm(x, weight, bias, residual=residual, out=(x, residual))
    assert out is x
    assert total is residual
    assert_array_equal(KERNELS.get(x), expected[0])
    assert_array_equal(KERNELS.get(residual), expected[1])
