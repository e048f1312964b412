"""The softmax kernels against the float64 reference, within its derived bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS
from support.dtypes import DTYPES
from support.search import deep, examples
from support.strategies import SoftmaxProblem, softmax_problems

import cupyattn
from cupyattn import reference
from cupyattn.kernels.configs.layers.softmax import HELD
from cupyattn.kernels.configs.tables import pairs

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Around every limit of the table, and far beyond the last.
LIMITS = tuple(filter(None, HELD[75]))
LENGTHS = (*LIMITS, *(limit + 1 for limit in LIMITS), 40_000)
SHORTER = tuple(limit - 1 for limit in LIMITS)
EACH_LENGTH = [*zip(LENGTHS, itertools.cycle(DTYPES), itertools.cycle((1, 5)), strict=False)]


def require_within_bounds(problem: SoftmaxProblem) -> None:
    x = problem.x()
    out = KERNELS.get(cupyattn.softmax(KERNELS.put(x)))
    bound = reference.softmax_bound(x, dtype=problem.dtype)
    assert reference.error_ratio(out, reference.softmax(x), bound) <= 1

    dout = problem.dout()
    dx = KERNELS.get(cupyattn.softmax_backward(KERNELS.put(dout), KERNELS.put(out)))
    bound = reference.softmax_backward_bound(dout, out, dtype=problem.dtype)
    assert reference.error_ratio(dx, reference.softmax_backward(dout, out), bound) <= 1


@examples(6)
@given(problem=softmax_problems(dtypes=DTYPES))
def test_within_bounds_of_the_reference(problem: SoftmaxProblem):
    require_within_bounds(problem)


@pytest.mark.parametrize(
    ("length", "dtype", "rows"),
    [
        *EACH_LENGTH,
        *deep(
            *(
                case
                for case in pairs((*LENGTHS, *SHORTER), DTYPES, (1, 5))
                if case not in EACH_LENGTH
            )
        ),
    ],
)
def test_row_lengths_around_the_tables_limits(length: int, dtype: str, rows: int):
    problem = SoftmaxProblem((rows, length), dtype, spread=3.0, masked=rows > 1, seed=1)
    require_within_bounds(problem)


@examples(8)
@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.sampled_from((1, 2, -1)), min_size=4, max_size=4),
    backward=st.booleans(),
)
def test_outer_axes_of_any_strides(shape, order, steps, backward):
    """Transposed, strided and reversed outer axes: the same as a copy, bit for bit."""
    length = 24
    sizes = [extent * abs(step) for extent, step in zip(shape, steps, strict=True)]
    memory = np.random.default_rng(0).standard_normal((*sizes, length)).astype(np.float16)
    view = memory[tuple(slice(None, None, step) for step in steps)].transpose(*order, 4)
    copy = np.ascontiguousarray(view)
    if backward:
        view_result = cupyattn.softmax_backward(KERNELS.put(view), KERNELS.put(copy))
        copy_result = cupyattn.softmax_backward(KERNELS.put(copy), KERNELS.put(copy))
    else:
        view_result = cupyattn.softmax(KERNELS.put(view))
        copy_result = cupyattn.softmax(KERNELS.put(copy))
    assert_array_equal(KERNELS.get(view_result), KERNELS.get(copy_result))


def test_rows_without_an_entry_and_rows_with_a_nan():
    x = np.zeros((4, 300), np.float32)
    x[0] = -np.inf
    x[1, 7] = np.nan
    x[2, 5] = np.inf
    out = KERNELS.get(cupyattn.softmax(KERNELS.put(x)))
    assert not out[0].any()
    assert np.isnan(out[1]).all()
    assert np.isnan(out[2, 5])
    assert np.allclose(out[3], 1 / 300)
