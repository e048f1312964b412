"""softmax, log_softmax and logsumexp: kernels within the bounds of the float64 reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import DTYPES, KERNELS, everywhere, placed
from support.search import deep, examples

import cupyattn
from cupyattn import reference
from cupyattn.ops.softmax.kernels import HELD
from cupyattn.runtime.tables import pairs
from cupyattn.testing import SoftmaxCase, assert_within_bounds, expected, softmax_cases

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

# Around every limit of the table, and far beyond the last.
LIMITS = tuple(filter(None, HELD[75]))
LENGTHS = (*LIMITS, *(limit + 1 for limit in LIMITS), 40_000)
SHORTER = tuple(limit - 1 for limit in LIMITS)
PLAIN = [
    (0, "float32", 3), (1, "float16", 3), (128, "float16", 1), (129, "float16", 1),
    (8192, "bfloat16", 1), (16_385, "float32", 5), (40_000, "float16", 1),
]  # fmt: skip


def require_softmax_within_bounds(case: SoftmaxCase) -> None:
    (x,), dout = case.arrays(), case.dout()
    out = KERNELS.get(cupyattn.softmax(KERNELS.put(x)))
    assert_within_bounds(out, *expected(cupyattn.softmax, x))
    dx = cupyattn.softmax_backward(KERNELS.put(dout), KERNELS.put(out))
    assert_within_bounds(dx, *expected(cupyattn.softmax_backward, dout, out))


@pytest.mark.deep
@examples(6)
@given(problem=softmax_cases(dtypes=DTYPES))
def test_softmax_of_any_rows_is_within_bounds(problem: SoftmaxCase):
    require_softmax_within_bounds(problem)


@pytest.mark.parametrize(
    ("length", "dtype", "rows"),
    [*PLAIN, *deep(*(c for c in pairs((*LENGTHS, *SHORTER), DTYPES, (1, 5)) if c not in PLAIN))],
)
def test_row_lengths_around_the_tables_limits(length: int, dtype: str, rows: int):
    problem = SoftmaxCase((rows, length), dtype, spread=3.0, masked=rows > 1, seed=1)
    require_softmax_within_bounds(problem)


@examples(4)
@given(
    shape=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    steps=st.lists(st.sampled_from((1, 2, -1)), min_size=4, max_size=4),
    backward=st.booleans(),
)
def test_outer_axes_of_any_strides(shape, order, steps, backward):
    """Transposed, strided and reversed outer axes give the bits of a copy."""
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


def case_of(
    shape: tuple[int, ...],
    dtype: str,
    masked: tuple[bool, ...] | None = None,
    biased: tuple[bool, ...] | None = None,
    **options: Any,
) -> SoftmaxCase:
    """Rows with a mask and a bias that vary along these axes."""

    def narrowed(axes: tuple[bool, ...]) -> tuple[int, ...]:
        return tuple(n if varies else 1 for n, varies in zip(shape, axes, strict=True))

    mask = None if masked is None else narrowed(masked)
    bias = None if biased is None else (narrowed(biased), "float32")
    return SoftmaxCase(shape, dtype, **{"spread": 3.0, **options}, mask=mask, bias=bias)


def require_options_within_bounds(case: SoftmaxCase) -> None:
    """Assert it of every function of the family."""
    (x,), dout, options = case.arrays(), case.dout(), case.keywords()
    on_device = {name: placed(KERNELS, value) for name, value in options.items()}
    given_x = KERNELS.put(x)
    for name in ("softmax", "log_softmax"):
        function, backward = getattr(cupyattn, name), getattr(cupyattn, f"{name}_backward")
        out = function(given_x, **on_device)
        assert_within_bounds(out, *expected(function, x, **options))
        dx = backward(KERNELS.put(dout), out, scale=case.scale)
        assert_within_bounds(dx, *expected(backward, dout, KERNELS.get(out), scale=case.scale))
    lse = cupyattn.logsumexp(given_x, **on_device)
    assert_within_bounds(lse, *expected(cupyattn.logsumexp, x, **options))
    backward = cupyattn.logsumexp_backward
    dout = np.random.default_rng(case.seed).standard_normal(x.shape[:-1], np.float32)
    dx = backward(KERNELS.put(dout), given_x, lse, **on_device)
    assert_within_bounds(dx, *expected(backward, dout, x, KERNELS.get(lse), **options))


@pytest.mark.deep
@examples(4)
@given(
    case=softmax_cases(
        dtypes=DTYPES,
        row_lengths=(1, 24, 33, 128, 200, 1024),
        options=("scale", "causal", "mask", "bias"),
    )
)
def test_drawn_options_are_within_bounds(case):
    require_options_within_bounds(case)


FULL = (True, True)
PROBLEMS = [
    case_of((2, 3, 24), "float16"),
    case_of(
        (3, 4, 33), "bfloat16", (True, False, True), (False, True, True),
        causal=True, scale=-2.0, spread=20.0,
    ),
]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=["bare", "full"])
def test_bare_and_full_options_are_within_bounds(problem):
    require_options_within_bounds(problem)


@pytest.mark.parametrize(
    ("width", "dtype", "options"),
    [
        (24_000, "float16", {"masked": (False, True), "biased": FULL, "causal": True}),
        *deep((2048, "float16", {"masked": FULL, "biased": FULL, "scale": 0.125})),
        *deep((2047, "bfloat16", {"causal": True})),
        *deep(*itertools.product((2048, 4095, 8192, 16_384), DTYPES, ({"biased": FULL},))),
        *deep((24_000, "float32", {"masked": (False, True), "causal": True})),
        *deep((24_001, "float16", {}), (130_000, "float16", {"masked": FULL})),
    ],
)
def test_long_rows(width, dtype, options):
    require_options_within_bounds(case_of((3, width), dtype, **options))


@everywhere
@pytest.mark.parametrize("spread", [1e4, 3e38])
def test_largest_logits_do_not_overflow(side, spread):
    """Sums of the largest numbers: no overflow, and the maximum is exact."""
    x = np.array([[1.0, -1.0, 0.5, 1.0]], np.float32) * np.float32(spread)
    out = side.get(cupyattn.softmax(side.put(x)))
    assert_array_equal(out, [[0.5, 0, 0, 0.5]])
    lse = side.get(cupyattn.logsumexp(side.put(x)))
    np.testing.assert_allclose(lse, [spread + np.log(2)], rtol=1e-7)
    logs = side.get(cupyattn.log_softmax(side.put(x / 2)))
    np.testing.assert_allclose(
        logs[0, :3], -np.array([0, 1, 0.25]) * np.float32(spread) - np.log(2), rtol=1e-6
    )


@everywhere
@pytest.mark.parametrize("length", [8, 64, 200])
def test_rows_of_large_negative_scores_are_normalised(side, length):
    """With any larger number as the maximum, every exponential is 0; short rows are one vector."""
    x = side.put(np.full((3, length), -2000, np.float16))
    assert_array_equal(side.get(cupyattn.softmax(x)), np.full((3, length), 1 / length, np.float16))
    lse = side.get(cupyattn.logsumexp(x))
    np.testing.assert_allclose(lse, np.full(3, np.log(length) - 2000), rtol=1e-6)


@everywhere
def test_fully_masked_rows_give_zeros_and_no_nan(side):
    """Gradients are zero although x and dout are NaN."""
    x = side.put(np.full((2, 40), np.nan, np.float32))
    mask, dout = (
        side.put(np.zeros((1, 1), np.bool_)),
        side.put(np.full((2, 40), np.nan, np.float32)),
    )
    assert (side.get(cupyattn.softmax(x, mask=mask)) == 0).all()
    logs = cupyattn.log_softmax(x, mask=mask)
    assert (side.get(logs) == -np.inf).all()
    assert (side.get(cupyattn.log_softmax_backward(dout, logs)) == 0).all()
    lse = cupyattn.logsumexp(x, mask=mask)
    assert (side.get(lse) == -np.inf).all()
    ones = side.put(np.ones(2, np.float32))
    assert (side.get(cupyattn.logsumexp_backward(ones, x, lse, mask=mask)) == 0).all()


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(
    ("offset", "width"),
    [(1e4, 64), (1e6, 64), *deep((-1e4, 4100))],  # the last: no maximum of several warps is near 0
)
def test_offset_of_all_scores_costs_the_documented_accuracy(offset, width):
    """Without a scale nothing is lost; rounded scores lose offset * 2**-24."""
    rng = np.random.default_rng(0)
    x = (offset + 3 * rng.standard_normal((4, width))).astype(np.float32)
    placed_x, step = KERNELS.put(x), abs(offset) * 2.0**-24

    def off(weights, scale=1.0):
        exact = reference.softmax(x, scale=scale)
        return np.max(np.abs(KERNELS.get(weights) - exact) / exact)

    assert off(cupyattn.softmax(placed_x)) < 4e-6
    assert 0.1 * step < off(cupyattn.softmax(placed_x, scale=0.37), 0.37) < 2 * step + 4e-6
    lse, ones = cupyattn.logsumexp(placed_x), KERNELS.put(np.ones(4, np.float32))
    assert 0.1 * step < off(cupyattn.logsumexp_backward(ones, placed_x, lse)) < step + 4e-6


@everywhere
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_nan_and_infinity_affect_only_their_row(side, odd):
    x = np.zeros((3, 40), np.float32)
    x[1, 7] = odd
    for name in ("softmax", "log_softmax", "logsumexp"):
        found = side.get(getattr(cupyattn, name)(side.put(x))).reshape(3, -1)
        assert np.isnan(found[1]).all(), name
        assert np.isfinite(found[[0, 2]]).all(), name


@everywhere
def test_masked_items_have_zero_gradient_for_any_lse(side):
    """The given lse determines the weights."""
    out, dout = np.array([[-np.inf, np.inf, 0], [1, 1, np.inf]], np.float32)
    mask = np.arange(40) != 7
    arrays = map(side.put, (dout, np.zeros((3, 40), np.float32), out))
    found = side.get(cupyattn.logsumexp_backward(*arrays, mask=side.put(mask)))
    assert_array_equal(found, np.where(mask, np.float32([[1], [0], [np.inf]]), 0))


@everywhere
def test_masked_items_may_be_nan(side):
    x = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    hidden = np.triu(np.ones((6, 6), np.bool_), 1)
    poisoned = np.where(hidden, np.float32(np.nan), x)
    for name in ("log_softmax", "logsumexp"):
        function = getattr(cupyattn, name)
        expected = side.get(function(side.put(x), causal=True))
        assert_array_equal(side.get(function(side.put(poisoned), causal=True)), expected)
        assert_array_equal(side.get(function(side.put(poisoned), mask=side.put(~hidden))), expected)


@everywhere
@pytest.mark.parametrize("rows", [2, 9])
def test_causal_mask_is_aligned_to_the_last_row(side, rows):
    """More columns than rows: the last row sees all; fewer: the first rows see nothing."""
    x = np.zeros((rows, 5), np.float32)
    out = side.get(cupyattn.softmax(side.put(x), causal=True))
    seen = np.arange(5)[None] <= np.arange(rows)[:, None] + 5 - rows
    np.testing.assert_allclose(out, seen / np.maximum(seen.sum(1, keepdims=True), 1), rtol=1e-6)


@everywhere
@pytest.mark.parametrize("axis", [1, *deep(0, -2)])
def test_options_along_another_axis(side, axis):
    """Options broadcast to the shape of x."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    mask, bias = rng.random((4, 1)) < 0.6, rng.standard_normal((3, 1, 5)).astype(np.float32)
    moved = [np.moveaxis(np.broadcast_to(array, x.shape), axis, -1) for array in (x, mask, bias)]
    turned = side.put(np.moveaxis(np.ascontiguousarray(moved[0]), -1, axis))
    options = {"mask": side.put(mask), "bias": side.put(bias), "scale": 0.5, "causal": True}
    expected = {"mask": moved[1], "bias": moved[2], "scale": 0.5, "causal": True}
    exact = np.moveaxis(reference.softmax(moved[0], **expected), -1, axis)
    out = side.get(cupyattn.softmax(turned, axis=axis, **options))
    np.testing.assert_allclose(out, exact, atol=1e-6)
    lse = cupyattn.logsumexp(turned, axis=axis, **options)
    np.testing.assert_allclose(
        side.get(lse), reference.logsumexp(moved[0], **expected), rtol=1e-5, atol=1e-6
    )
    dx = cupyattn.logsumexp_backward(
        side.put(np.ones(lse.shape, np.float32)), turned, lse, axis=axis, **options
    )
    np.testing.assert_allclose(side.get(dx), 0.5 * exact, atol=1e-6)


X = np.zeros((2, 3, 8), np.float32)
REFUSED = {
    "mask of numbers": ({"mask": np.zeros(8, np.uint8)}, TypeError, "mask has dtype uint8"),
    "mask too long": ({"mask": np.zeros((3, 9), bool)}, ValueError, r"mask has shape \(3, 9\)"),
    "mask of more axes": ({"mask": np.zeros((1, 2, 3, 8), bool)}, ValueError, "it broadcasts"),
    "bias of integers": ({"bias": np.zeros(8, np.int32)}, TypeError, "bias has dtype int32"),
    "bias that fits not": ({"bias": np.zeros((2, 1), "f4")}, ValueError, r"bias has shape \(2,"),
    "a list": ({"mask": [True] * 8}, TypeError, "mask has type builtins.list"),
    "scale a string": ({"scale": "1"}, TypeError, "scale has type str; it must be a real number"),
    "scale infinite": ({"scale": np.inf}, ValueError, "scale = inf; it is a finite number"),
    "causal a number": ({"causal": 1}, TypeError, "causal = 1; it is True or False"),
}  # fmt: skip


@everywhere
@pytest.mark.parametrize("axis", [-1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_options_are_refused(side, name, axis):
    options, kind, message = REFUSED[name]
    options = {key: placed(side, value) for key, value in options.items()}
    for function in (cupyattn.softmax, cupyattn.log_softmax, cupyattn.logsumexp):
        with pytest.raises(kind, match=message):
            function(side.put(X), axis=axis, **options)
