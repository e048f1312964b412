"""Dropout: the mask that NumPy draws too, its scale, residuals, gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from support.devices import KERNELS, everywhere
from support.dtypes import DTYPES, dtype_of
from support.search import examples, wider

import cupyattn
from cupyattn import DropoutGrads, reference
from cupyattn.emulator import Report

LENGTHS = (1, 4, 7, 8, 12, 33, 256, 1021)
SEEDS = (0, 1, 2**32 - 1, 2**32, 2**64 - 1)


@pytest.mark.nvrtc
@pytest.mark.usefixtures("kernels_run")
@examples(10)
@given(
    dtype=st.sampled_from(wider(("float16", "float32"), DTYPES)),
    rows=st.integers(1, 3),
    length=st.sampled_from(LENGTHS),
    p=st.sampled_from((0.0, 0.1, 0.5, 0.999, 0.999999)),
    seed=st.sampled_from(SEEDS),
    residual=st.booleans(),
    view=st.sampled_from(("contiguous", "transposed", "sliced")),
)
@example("float16", 1, 33, 0.5, 1, False, "sliced")  # a thread has several items, loaded alone
def test_the_mask_is_the_references(dtype, rows, length, p, seed, residual, view):
    """Whatever the strides: a mask belongs to items in C order. Zeros stand where it says so."""
    rng = np.random.default_rng(length)
    shape = (2, rows, length)
    x = rng.uniform(1, 2, shape).astype(dtype_of(dtype))
    other = rng.standard_normal(shape).astype(x.dtype) if residual else None
    laid = x
    if view == "transposed":
        laid = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
    elif view == "sliced":
        memory = np.zeros((2, rows, length + 3), x.dtype)
        laid = memory[..., 3:]
        laid[...] = x
    given_residual = None if other is None else KERNELS.put(other)
    out = KERNELS.get(cupyattn.dropout(KERNELS.put(laid), p, seed, residual=given_residual))
    exact = reference.dropout(x, p, seed, other)
    bound = reference.dropout_bound(x, p, seed, other, dtype=dtype)
    assert reference.error_ratio(out, exact, bound) <= 1
    if not residual:
        kept = reference.element_keep(seed, p, np.arange(x.size)).reshape(shape)
        assert_array_equal(out != 0, kept)


@everywhere
def test_the_same_on_every_side(side):
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    kept = reference.element_keep(7, 0.25, np.arange(200).reshape(5, 40))
    found = side.get(cupyattn.dropout(side.put(x), 0.25, 7))
    assert_allclose(found, np.where(kept, x / 0.75, 0), rtol=1e-6)


def test_fields_are_random_and_each_item_has_its_own():
    items = np.arange(2**16)
    for p in (0.1, 0.5, 0.9):
        share = reference.element_keep(3, p, items).mean()
        assert abs(share - (1 - p)) < 6 * np.sqrt(p * (1 - p) / items.size)
    kept = [reference.element_keep(seed, 0.5, items) for seed in (1, 2, 2**32 + 1)]
    kept += [reference.element_keep(1, 0.5, items + 2**40), np.roll(kept[0], 1)]
    for i, first in enumerate(kept):
        for second in kept[:i]:
            assert abs((first == second).mean() - 0.5) < 0.02
    attention = reference.attention_keep(1, 0.5, 0, 0, np.arange(256), np.arange(256))
    assert abs((attention.ravel() == kept[0]).mean() - 0.5) < 0.02
    whole = reference.element_keep(1, 0.5, items)
    assert_array_equal(reference.element_keep(1, 0.5, items[77:99][::-1]), whole[77:99][::-1])


@everywhere
@pytest.mark.parametrize("p", [0.1, 1e-3, 1 - 1 / 65536, 0.9999])
def test_the_scale_is_that_of_the_rounded_probability(side, p):
    """So the average over all fields is x: 65536 of them, of which round(65536 p) drop."""
    dropped = round(65536 * p)
    x = np.ones((4, 1024), np.float32)
    expected = np.float32(65536 / (65536 - dropped))
    for found in (
        side.get(cupyattn.dropout(side.put(x), p, 3)),
        side.get(cupyattn.dropout_backward(side.put(x), p, 3).dx),
    ):
        assert (set(np.unique(found)) - {np.float32(0)}) <= {expected}
    assert expected != np.float32(1 / (1 - p)) or p == 1 - 1 / 65536


@everywhere
def test_probabilities_that_round_to_0_and_to_1(side):
    x = np.full((3, 8), 3.0, np.float32)
    x[1] = np.nan
    assert_array_equal(side.get(cupyattn.dropout(side.put(x), 2.0**-18, 3)), x)
    almost = 1 - 2.0**-18
    zeros = np.zeros((3, 8))
    assert_array_equal(side.get(cupyattn.dropout(side.put(x), almost, 3)), zeros)
    assert_array_equal(side.get(cupyattn.dropout_backward(side.put(x), almost, 3).dx), zeros)
    residual = side.put(np.full((3, 8), 2.0, np.float32))
    found = cupyattn.dropout(side.put(x), almost, 3, residual=residual)
    assert_array_equal(side.get(found), np.full((3, 8), 2.0))


@everywhere
def test_gradients(side):
    x, dout, there = np.random.default_rng(0).standard_normal((3, 3, 24), dtype=np.float32)
    put = [side.put(a.copy()) for a in (x, dout, there)]
    expected = reference.dropout(dout, 0.3, 5).astype(np.float32)
    dx, dresidual = cupyattn.dropout_backward(put[1], 0.3, 5)
    assert_allclose(side.get(dx), expected, rtol=1e-6)
    assert dresidual is put[1]
    added = cupyattn.dropout_backward(
        put[1], 0.3, 5, grads=DropoutGrads(put[2]), accumulate=True
    ).dx
    assert added is put[2]
    assert_allclose(side.get(added), there + expected, rtol=1e-6, atol=1e-6)
    out, pullback = cupyattn.vjp(
        lambda r, x: cupyattn.dropout(x, 0.3, 5, residual=r), side.put(there), put[0]
    )
    dresidual, dx = pullback(put[1])
    assert_allclose(side.get(out), reference.dropout(x, 0.3, 5, there), rtol=1e-5, atol=1e-6)
    assert_array_equal(side.get(dresidual), dout)
    assert_allclose(side.get(dx), expected, rtol=1e-6)


@everywhere
def test_in_place_and_dropped_nans(side):
    x = np.full((4, 64), np.nan, np.float16)
    placed = side.put(x)
    assert cupyattn.dropout(placed, 0.5, 3, out=placed) is placed
    kept = reference.element_keep(3, 0.5, np.arange(256)).reshape(4, 64)
    assert_array_equal(np.isnan(side.get(placed)), kept)
    residual = side.put(np.ones((4, 64), np.float16))
    cupyattn.dropout(
        side.put(np.zeros((4, 64), np.float16)), 0.5, 3, residual=residual, out=residual
    )
    assert (side.get(residual) == 1).all()


@pytest.mark.nvrtc
def test_another_seed_is_another_call_of_the_same_plan():
    """Seeds change in every call: they are no part of what is remembered."""
    from cupyattn.ops import elements

    x = np.ones((2, 8), np.float16)
    with cupyattn.backend("emulator"):
        cupyattn.dropout(x, 0.5, 0)
        before = elements._plan.cache_info().misses
        found = [cupyattn.dropout(x, p, seed) for seed in (1, 2) for p in (0.5, 0.25)]
        assert elements._plan.cache_info().misses == before
    assert len({array.tobytes() for array in found}) == 4


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_whole_sectors(dtype):
    report = Report()
    x = np.ones((2, 512), dtype)
    with cupyattn.backend("emulator", report=report):
        cupyattn.dropout(x, 0.1, 3, residual=x)
    assert report.sector_efficiency == 1.0


X = np.ones((2, 8), np.float32)


@everywhere
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda x: cupyattn.dropout(x, 1.0, 3), ValueError, "p = 1.0; it is at least 0 and below"),
        (lambda x: cupyattn.dropout(x, -0.1, 3), ValueError, "p = -0.1; "),
        (lambda x: cupyattn.dropout(x, float("nan"), 3), ValueError, "p = nan; "),
        (lambda x: cupyattn.dropout(x, "0.1", 3), TypeError, "p is a str; it is a real number"),
        (lambda x: cupyattn.dropout(x, 0.1, None), ValueError, "p = 0.1 without a seed; "),
        (lambda x: cupyattn.dropout(x, 0.1, 1.0), TypeError, "seed is 1.0, a float"),
        (lambda x: cupyattn.dropout(x, 0.1, -1), ValueError, "seed = -1; it is an integer from 0"),
        (lambda x: cupyattn.dropout(x, 0.1, 2**64), ValueError, "seed = 18446744073709551616; "),
        (lambda x: cupyattn.dropout(x, 0.1, 1, residual=x[:1]), ValueError, "residual has shape"),
        (lambda x: cupyattn.dropout(None, 0.1, 1), TypeError, "x is None"),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, accumulate=True),
            ValueError,
            "without grads",
        ),
        (lambda x: cupyattn.dropout_backward(x, 0.1, 1, accumulate=2), TypeError, "accumulate = 2"),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=DropoutGrads(x[:1])),
            ValueError,
            r"grads\.dx is float32",
        ),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=DropoutGrads(x, x)),
            ValueError,
            r"grads\.dresidual was given; .*dout itself",
        ),
        (
            lambda x: cupyattn.dropout_backward(x, 0.1, 1, grads=x),
            TypeError,
            "grads is a .*; it is a DropoutGrads",
        ),
    ],
)
def test_bad_input(side, call, kind, message):
    with pytest.raises(kind, match=message):
        call(side.put(X.copy()))


@everywhere
def test_no_seed_without_dropout(side):
    x = side.put(X.copy())
    assert_array_equal(side.get(cupyattn.dropout(x, 0.0, None)), X)
    assert_array_equal(side.get(cupyattn.dropout(x, 0, None, residual=x)), 2 * X)
