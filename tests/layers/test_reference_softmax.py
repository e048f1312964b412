import math

import numpy as np
from hypothesis import given, settings
from support.dtypes import DTYPES
from support.strategies import softmax_problems

from cupyattn.reference import softmax, softmax_backward


@settings(deadline=None, max_examples=60)
@given(softmax_problems(dtypes=DTYPES, row_lengths=(0, 1, 2, 33)))
def test_matches_scalar_loops(problem):
    x = problem.x()
    result = softmax(x)
    assert result.shape == x.shape
    assert result.dtype == np.float64
    rows = x.reshape(-1, x.shape[-1]) if x.size else np.empty((0, 1))
    for row, actual in zip(rows[:5], result.reshape(rows.shape)[:5], strict=True):
        total = sum(math.exp(value) for value in row.astype(np.float64))
        expected = [math.exp(value) / total if total else 0.0 for value in row.astype(np.float64)]
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-300)


def test_special_values():
    inf, nan = np.inf, np.nan
    x = [[0.0, -inf], [-inf, -inf], [nan, 0.0], [inf, 0.0], [1e308, -1e308]]
    expected = [[1.0, 0.0], [0.0, 0.0], [nan, nan], [nan, nan], [1.0, 0.0]]
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(softmax(x), expected)
        assert softmax(np.empty((3, 0))).shape == (3, 0)
        assert softmax_backward(np.empty((3, 0)), np.empty((3, 0))).shape == (3, 0)


@settings(deadline=None, max_examples=30)
@given(softmax_problems(row_lengths=(1, 2, 33)))
def test_backward_matches_finite_differences(problem):
    x, dout = problem.x().astype(np.float64), problem.dout().astype(np.float64)
    direction = np.random.default_rng(problem.seed).standard_normal(x.shape)
    h = 1e-5
    difference = ((softmax(x + h * direction) - softmax(x - h * direction)) * dout).sum() / (2 * h)
    derivative = (softmax_backward(dout, softmax(x)) * direction).sum()
    np.testing.assert_allclose(derivative, difference, rtol=1e-6, atol=1e-7 * max(1, x.size))
