"""Rows in int8, rotated weights, and products of int8 by int8 on tensor cores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, dtype_of, without_tensor_cores
from support.linear_problems import (
    LinearProblem,
    always,
    backward_ratio,
    forget_plans,
    forward_ratio,
    put,
)
from support.search import deep, examples, wider

import cupyattn
from cupyattn import QuantizedRows, QuantizedWeight, reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_int8
from cupyattn.ops.linear.kernels_rows import ROW_CODES
from cupyattn.ops.linear.plan import forward_call, forward_plan
from cupyattn.ops.linear.problem import LinearArrays, RowFormat, weight_fields
from cupyattn.ops.linear.reference import int8_sums, quantize_rows, rotated
from cupyattn.ops.linear.tiles import TensorCoreProduct
from cupyattn.reference import error_ratio
from cupyattn.runtime.arrays import adopt
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.errors import RefusalError
from cupyattn.testing import lay_out

pytestmark = pytest.mark.nvrtc

T4, RTX_2080_TI = DeviceTraits(75, 40), DeviceTraits(75, 68, geforce=True)
MEMORY = "contiguous", "padded", "sliced"


def rows_of(
    rows: int, inner: int, dtype: str = "float16", view: str = "contiguous", seed: int = 0
) -> np.ndarray:
    """x with outliers, and rows of zeros, of tiny and huge numbers, of an infinity and of NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inner), np.float32) * rng.choice([1, 1, 1, 30], (1, inner))
    for first, factor in ((1, 0.0), (2, 1e-3 if dtype == "float16" else 1e-32), (3, 100.0)):
        x[first::9] *= np.float32(factor)
    if dtype != "float16":
        x[4::9] *= np.float32(1e-27)
        x[5::9] *= np.float32(1e-20)
    x[6::9, inner // 2] = np.inf
    x[7::9, inner - 1] = np.nan
    return lay_out(x.astype(dtype_of(dtype)), view)


def host(quantised: QuantizedRows | QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    return KERNELS.get(quantised.codes), KERNELS.get(quantised.scales)


def assert_same(found: Any, codes: np.ndarray, scales: np.ndarray) -> None:
    """Equal codes and scales, bit by bit."""
    found_codes, found_scales = host(found)
    assert_array_equal(found_codes, codes)
    assert_array_equal(found_scales, scales)  # a NaN has any payload


LENGTHS = wider((32, 576), (64, 256, 320, 1024, 1056, 2048, 4128, 8192, 16_384, 16_416, 20_032))


@examples(6, deep=60)
@given(st.data())
def test_codes_and_scales_of_rows_equal_numpys(data):
    inner = data.draw(st.sampled_from(LENGTHS))
    rotation = data.draw(st.sampled_from((None, 64) if inner % 64 == 0 else (None,)))
    dtype = data.draw(st.sampled_from(wider(("float16", "float32"), ("bfloat16",))))
    view = data.draw(st.sampled_from(MEMORY))
    x = rows_of(data.draw(st.integers(1, 20)), inner, dtype, view, data.draw(st.integers(0, 9)))
    with KERNELS.running():
        found = cupyattn.quantize_rows(KERNELS.put(x), rotation=rotation)
    assert found.dtype == x.dtype
    assert_same(found, *quantize_rows(x, rotation))


@pytest.mark.parametrize("length", [2048, 16_448, *deep(4096, 8192, 16_384)])
def test_rows_of_a_whole_cta(length):
    x = rows_of(9, length)
    with KERNELS.running():
        assert_same(cupyattn.quantize_rows(KERNELS.put(x), rotation=64), *quantize_rows(x, 64))


def test_every_configuration_of_rows_has_a_length():
    limits = [limit or 20_032 for limit in ROW_CODES]
    assert {*limits} <= {256, 512, 1024, 2048, 4096, 8192, 16_384, 20_032}


@given(st.integers(0, 99), st.sampled_from((64, 192)), st.booleans())
def test_codes_are_within_half_a_step_of_the_rotated_row(seed, inner, is_rotated):
    """The definition by an explicit Hadamard matrix, not by sums and differences."""
    x = np.random.default_rng(seed).standard_normal((3, inner)).astype(np.float32)
    bits = np.arange(64)[:, None] & np.arange(64)
    signs = np.vectorize(lambda n: (-1.0) ** bin(n).count("1"))(bits)
    hadamard = np.kron(np.eye(inner // 64), signs / 8) if is_rotated else np.eye(inner)
    rows = cupyattn.quantize_rows(x, rotation=64 if is_rotated else None)
    exact = x.astype(np.float64) @ hadamard
    scales = rows.scales[:, None].astype(np.float64)
    np.testing.assert_allclose(scales[:, 0] * 127, np.abs(exact).max(axis=1), rtol=1e-6)
    assert np.abs(rows.codes * scales - exact).max() <= 0.5001 * scales.max()
    assert np.abs(rows.codes).max() == 127


def test_values_halfway_between_codes_round_to_even():
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = 127, 0.5, 1.5, 2.5, -0.5, -1.5
    assert cupyattn.quantize_rows(x).codes[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


def test_special_rows_have_special_scales():
    x = np.zeros((5, 64), np.float32)
    x[1, 3], x[2, 5], x[3, 7], x[4, 9] = np.inf, np.nan, 2.0**-101, 2.0**-100
    for rotation in (None, 64):
        rows = cupyattn.quantize_rows(x, rotation=rotation)
        assert rows.scales[0] == rows.scales[3] == 0
        assert np.isnan(rows.scales[1:3]).all()
        assert not rows.codes[:4].any()
        assert rows.codes[4].any()


@pytest.mark.parametrize(
    ("inner", "along"), [(64, True), (192, False), *deep((1088, True), (1088, False))]
)
def test_rotated_weights_equal_numpys(inner, along):
    rng = np.random.default_rng(0)
    w = (
        rng.standard_normal((40, inner), np.float32).T
        if along
        else rng.standard_normal((inner, 40))
    )
    w = (w * rng.choice([1e-3, 1, 30], (inner, 1))).astype(np.float16)
    want = cupyattn.quantize(w, format="int8", rotation=64)
    with KERNELS.running():
        found = cupyattn.quantize(put(w), format="int8", rotation=64)
        again = {
            transposed: KERNELS.get(cupyattn.dequantize(found.T if transposed else found))
            for transposed in (False, True)
        }
        half = KERNELS.get(cupyattn.dequantize(found, dtype="float16"))
    assert_same(found, want.codes, want.scales)
    assert found.rotation == found.T.rotation == found.T[:8].rotation == 64
    exact = cupyattn.dequantize(want)
    assert_array_equal(again[False], exact)
    assert_array_equal(again[True], exact.T)
    assert_array_equal(half, exact.astype(np.float16))
    steps = want.scales[:, 0] / 2 * 8  # 64 errors of half a step each, times 1 / 8
    assert (np.abs(exact - w) <= steps * 1.001).all()


def test_rotation_spreads_an_outlier():
    """An outlier makes the step of its column large; a rotation makes it an eighth."""
    w = np.random.default_rng(0).standard_normal((64, 8), np.float32)
    w[3] *= 1000
    plain, spread = (
        np.abs(cupyattn.dequantize(cupyattn.quantize(w, format="int8", rotation=rotation)) - w)
        for rotation in (None, 64)
    )
    others = np.arange(64) != 3
    assert np.sqrt((spread[others] ** 2).mean()) < 0.5 * np.sqrt((plain[others] ** 2).mean())


@contextmanager
def tile(shape: str) -> Iterator[None]:
    """Inside, products have this tile."""
    with KERNELS.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorCoreProduct, "tiling", always(shape))
        forget_plans()
        yield
    forget_plans()


def case(
    rows: int, outer: int, inner: int, activation: str | None = None, **options: Any
) -> LinearProblem:
    rotation = 64 if (outer if options.get("transposed") else inner) % 64 == 0 else None
    options = {"dtype": "float16", "rotation": rotation} | options
    return LinearProblem((rows,), inner, outer, activation=activation, weights="int8", **options)


def int8_ratio(problem: LinearProblem, *, special: bool = False) -> float:
    """The largest error of an int8 product over its bound, for out and for the preactivation."""
    x, w, b = problem.arrays()
    if special:
        x = rows_of(len(x), x.shape[1], problem.dtype, seed=problem.seed) / x.dtype.type(4096)
    rows = cupyattn.quantize_rows(x, rotation=w.rotation)
    options = problem.keywords() | {"return_preactivation": True}
    residual = options.pop("residual", None)
    exact = reference.linear(rows, w, b, residual, activation=problem.activation)
    bounds = reference.linear_bound(
        rows, w, b, residual, activation=problem.activation, dtype=problem.dtype
    )
    moved = QuantizedRows(put(rows.codes), put(rows.scales), rows.rotation, dtype=rows.dtype)
    with KERNELS.running():
        found = cupyattn.linear(moved, *map(put, (w, b)), residual=put(residual), **options)
    assert found[0].dtype == x.dtype
    return max(
        error_ratio(KERNELS.get(each), result, bound)
        for each, result, bound in zip(found, exact, bounds, strict=True)
        if each is not None
    )


# At the last row and column of a tile, before and after them; the sum in one k-tile, in several
# and with a ragged one; stores of vectors and of items.
PRODUCTS = [
    ("wide", case(257, 193, 192, "gelu_tanh", residual=True)),
    ("short", case(130, 200, 96, "swiglu", dtype="float32", residual=True)),
    ("small", case(129, 72, 64, "silu", dtype="bfloat16")),
    ("narrow", case(70, 136, 160)),
    ("few", case(65, 72, 224, "geglu", residual=True)),
    *deep(
        ("wide", case(255, 104, 160, "swiglu", residual=True)),
        ("wide", case(300, 200, 256, "geglu", view="sliced", residual=True)),
        ("short", case(127, 193, 128, "gelu", dtype="float32", view="sliced", residual=True)),
        ("short", case(128, 192, 1024, "relu", residual=True)),
        ("small", case(260, 131, 96, "swiglu", dtype="bfloat16", residual=True)),
        ("small", case(1, 1, 32, dtype="float32", biased=False, seed=1)),
        ("narrow", case(256, 127, 320, "geglu", dtype="float32")),
        ("narrow", case(257, 264, 64, "gelu_tanh", view="padded", residual=True)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), PRODUCTS, ids=str)
def test_product_is_within_bounds(shape, problem):
    with tile(shape):
        assert 0 < int8_ratio(problem) <= 1


@examples(4, deep=40)
@given(st.data())
def test_drawn_products(data):
    dtype, activation, shape = data.draw(
        st.sampled_from(
            wider(
                (("float16", None, "small"),),
                (
                    ("float16", "swiglu", "wide"),
                    ("float16", "gelu", "short"),
                    ("float32", "silu", "narrow"),
                    ("bfloat16", None, "small"),
                ),
            )
        )
    )
    problem = case(
        data.draw(st.integers(1, 300)),
        data.draw(st.integers(1, 300)),
        32 * data.draw(st.integers(1, 20)),
        activation,
        dtype=dtype,
        view=data.draw(st.sampled_from(MEMORY)),
        residual=data.draw(st.booleans()),
        biased=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    with tile(shape):
        assert int8_ratio(problem, special=True) <= 1


@pytest.mark.deep
def test_largest_sums_are_exact():
    """All codes are 127, and K is the longest: a power of two as scale changes no bit."""
    inner = 32 * (133_000 // 32)
    codes = np.full((2, inner), 127, np.int8)
    ones, zero = np.ones(2, np.float32), np.zeros((2, 1), np.float32)
    rows = QuantizedRows(put(codes), put(ones), dtype="float32")
    w = QuantizedWeight("int8", put(codes), put(zero + 1), block_size=inner)
    with tile("small"):
        out = KERNELS.get(cupyattn.linear(rows, w))
    exact = 127 * 127 * inner
    assert 2**30 < exact < 2**31
    assert_array_equal(out, np.full((2, 2), np.float32(exact)))
    assert_array_equal(int8_sums(codes, codes), np.full((2, 2), float(exact)))


@pytest.mark.parametrize("dtype", ["float16", *deep("float32")])
def test_accesses_are_whole_sectors_without_bank_conflicts(dtype):
    x = rows_of(128, 512, dtype)
    w = cupyattn.quantize(np.ones((512, 128), np.float32), format="int8", rotation=64)
    reports = Report(), Report()
    with cupyattn.backend("emulator", report=reports[0]):
        rows = cupyattn.quantize_rows(x, rotation=64)
    with cupyattn.backend("emulator", report=reports[1]):
        cupyattn.linear(rows, w)
    for report in reports:
        assert (report.bank_conflict_ways, report.sector_efficiency) == (1, 1)


def test_rows_that_are_not_finite_are_nan_and_no_others():
    x = rows_of(20, 128)
    w = cupyattn.quantize(np.eye(128, dtype=np.float32), format="int8", rotation=64)
    with KERNELS.running():
        rows = cupyattn.quantize_rows(KERNELS.put(x), rotation=64)
        out = KERNELS.get(cupyattn.linear(rows, put(w)))
    broken = ~np.isfinite(x).all(axis=1)
    assert_array_equal(np.isnan(out).all(axis=1), broken)
    assert_array_equal(np.isnan(out).any(axis=1), broken)
    assert not out[1::9].any()
    assert broken.sum() == 4


def test_several_products_share_rows_and_write_into_out():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 64)).astype(np.float16)
    weights = [
        cupyattn.quantize(rng.standard_normal((64, n), np.float32), format="int8", rotation=64)
        for n in (24, 40)
    ]
    with KERNELS.running():
        rows = cupyattn.quantize_rows(KERNELS.put(x), rotation=64)
        again = cupyattn.quantize_rows(KERNELS.put(x[::-1].copy()), rotation=64, out=rows)
        assert again is rows
        for w in weights:
            out = KERNELS.put(np.empty((5, w.shape[1]), np.float16))
            assert cupyattn.linear(rows, put(w), out=out) is out
            want = cupyattn.linear(rows, put(w))
            assert_array_equal(KERNELS.get(out), KERNELS.get(want))
            assert_array_equal(
                KERNELS.get(out)[::-1],
                KERNELS.get(cupyattn.linear(cupyattn.quantize_rows(put(x), rotation=64), put(w))),
            )


def test_tiles_of_few_results_are_small():
    """Tiles of 64 x 128 for 128 rows and 2048 columns on a T4; the largest for many."""
    inner = 2048
    for rows, columns, tile_rows in ((128, 2048, 64), (4096, 16_384, 256)):
        x = np.zeros((rows, inner), np.int8)
        w = np.zeros((columns, inner), np.int8)
        weight = QuantizedWeight("int8", w, np.zeros((columns, 1), np.float32), block_size=inner)
        fields, form = weight_fields(weight)
        arrays = LinearArrays(x, *fields, x_scales=np.zeros(rows, np.float32))
        call = forward_call(adopt(arrays), None, False, form, RowFormat(None, np.dtype("float16")))
        (step,) = forward_plan(call, T4).steps
        assert dict(step.specialisation.macros)["TILE_ROWS"] == tile_rows


def kernels_of(rows: int, traits: DeviceTraits, *, quantised: bool = False) -> tuple[str, ...]:
    """The kernels of a product with a rotated weight on a device."""
    x = np.zeros((rows, 64), np.float16)
    w = cupyattn.quantize(np.ones((64, 72), np.float32), format="int8", rotation=64)
    weight, form = weight_fields(w)
    row_format = RowFormat(64, x.dtype if quantised else None)
    arrays: LinearArrays[Any] = LinearArrays(x, *weight)
    if quantised:
        found = cupyattn.quantize_rows(x, rotation=64)
        arrays.x, arrays.x_scales = found.codes, found.scales
    call = forward_call(adopt(arrays), None, False, form, row_format)
    return tuple(step.specialisation.spec.entry for step in forward_plan(call, traits).steps)


@pytest.mark.parametrize(("traits", "least"), [(T4, 112), (RTX_2080_TI, 48)])
def test_few_rows_are_multiplied_as_floats(traits, least):
    assert kernels_of(least, traits) == ("quantize_rows", "linear_forward_int8")
    assert kernels_of(least - 1, traits)[0] == "rotate_rows"
    assert kernels_of(1, traits, quantised=True) == ("linear_forward_int8",)
    without = traits._replace(tensor_cores=False)
    assert kernels_of(least, without) == ("rotate_rows", "linear_forward_quantised_f32")
    assert kernels_of(least, without, quantised=True)[0] == "dequantize"


def test_a_call_of_many_rows_quantises_them():
    problem = case(113, 40, 128, "silu")
    x, w, b = problem.arrays()
    with KERNELS.running():
        out = cupyattn.linear(*map(put, (x, w, b)), activation="silu", activations="int8")
        rows = cupyattn.quantize_rows(put(x), rotation=64)
        want = cupyattn.linear(rows, *map(put, (w, b)), activation="silu")
    assert_array_equal(KERNELS.get(out), KERNELS.get(want))


WEIGHT_ONLY = [
    case(5, 40, 128, "gelu", residual=True),
    case(70, 72, 192, "swiglu", residual=True),
    case(3, 33, 64, dtype="float32"),
    # The transpose of the weight, whose columns are rotated: N of the result is K of the weight.
    case(5, 64, 40, transposed=True, biased=False, residual=True, view="padded"),
    *deep(
        case(130, 136, 128, "silu", view="sliced"),
        case(20, 40, 320, dtype="bfloat16"),
        case(70, 192, 33, transposed=True, biased=False),
        case(7, 128, 72, transposed=True, biased=False, residual=True, dtype="float32"),
        case(7, 128, 72, transposed=True, biased=False, residual=True, view="sliced"),
    ),
]


@pytest.mark.parametrize("problem", WEIGHT_ONLY, ids=str)
def test_rotated_weight_with_float_rows_is_within_bounds(problem):
    with KERNELS.running():
        assert 0 < forward_ratio(problem)[0] <= 1


BACKWARD = [
    case(5, 40, 128, "gelu", given=False),
    case(70, 72, 64, accumulate=True),
    *deep(
        case(70, 136, 128, "swiglu", accumulate=True, view="sliced"),
        case(20, 40, 192, "silu", dtype="float32", given=False),
        case(3, 24, 64, "relu", dtype="bfloat16", biased=False),
    ),
]


@pytest.mark.parametrize("problem", BACKWARD, ids=str)
def test_gradient_of_a_rotated_weight_is_within_bounds(problem):
    with KERNELS.running():
        assert 0 < backward_ratio(problem) <= 1


def test_rows_without_tensor_cores_are_expanded():
    problem = case(5, 40, 128)
    x, w, b = problem.arrays()
    rows = cupyattn.quantize_rows(x, rotation=64)
    exact = reference.linear(rows, w, b)[0]
    with KERNELS.running(), without_tensor_cores():
        rows = QuantizedRows(put(rows.codes), put(rows.scales), 64)
        out = KERNELS.get(cupyattn.linear(rows, *map(put, (w, b))))
    np.testing.assert_allclose(out, exact, rtol=2e-3, atol=2e-3 * np.abs(exact).max())


def test_vjp_gives_the_gradient_of_the_float_product():
    x, w, b = case(6, 40, 128, "silu").arrays()
    with cupyattn.backend("reference"):
        out, pullback = cupyattn.vjp(
            lambda x, b: cupyattn.linear(x, w, b, activation="silu", activations="int8"), x, b
        )
        dx, db = pullback(out)
        z = cupyattn.linear(x, w, b, activations="int8")
        grads = cupyattn.linear_backward(out, x, w, b, activation="silu", preactivation=z)
    assert_array_equal(dx, grads.dx)
    assert_array_equal(db, grads.db)


W8 = cupyattn.quantize(np.ones((64, 8), np.float32), format="int8", rotation=64)
PLAIN = cupyattn.quantize(np.ones((64, 8), np.float32), format="int8")
BLOCKS = cupyattn.quantize(np.ones((64, 8), np.float32), format="int8", block_size=32)
LONG = QuantizedWeight(
    "int8", np.zeros((1, 133_024), np.int8), np.zeros((1, 1), np.float32), block_size=133_024
)
X = np.ones((3, 64), np.float16)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: cupyattn.linear(X, BLOCKS, activations="int8"), ValueError, "blocks of 32 along"),
        (lambda: cupyattn.linear(X, PLAIN.T, activations="int8"), ValueError, "blocks along N"),
        (
            lambda: cupyattn.linear(cupyattn.quantize_rows(X), W8),
            ValueError,
            "x has rotation = None, w rotation = 64",
        ),
        (
            lambda: cupyattn.linear(cupyattn.quantize_rows(X, rotation=64), PLAIN),
            ValueError,
            "x has rotation = 64, w rotation = None",
        ),
        (
            lambda: cupyattn.linear(np.ones((1, 133_024), np.float16), LONG, activations="int8"),
            ValueError,
            "K is at most 133,000",
        ),
        (
            lambda: cupyattn.linear(X, X.T, activations="int8"),
            TypeError,
            "a w that is not quantised",
        ),
        (
            lambda: cupyattn.linear(X, cupyattn.quantize(X.T, block_size=32), activations="int8"),
            TypeError,
            "a w of 'nf4'",
        ),
        (lambda: cupyattn.linear(X, W8, activations="int4"), ValueError, "activations = 'int4'"),
        (lambda: cupyattn.linear(X, W8, activations=8), TypeError, "activations = 8"),
        (lambda: cupyattn.linear(X, W8, activations=X), TypeError, "activations = "),
        (lambda: cupyattn.linear(cupyattn.quantize_rows(X), X.T), TypeError, "QuantizedRows as x"),
        (lambda: cupyattn.rms_norm(X, quantize=X), TypeError, "quantize = "),
        (lambda: cupyattn.quantize_rows(X, rotation=X), TypeError, "rotation = "),
        (lambda: cupyattn.quantize_rows(X, rotation=64.0), TypeError, "rotation = 64.0"),
        (
            lambda: cupyattn.linear(X.astype(np.float64), W8, activations="int8"),
            TypeError,
            "x has dtype float64",
        ),
        (
            lambda: cupyattn.linear(cupyattn.quantize_rows(X, rotation=64), W8, np.ones(8)),
            TypeError,
            "float64",
        ),
        (
            lambda: cupyattn.linear(np.ones((3, 8), np.float16), W8.T, activation="relu"),
            ValueError,
            "rotated back, and take neither",
        ),
        (lambda: cupyattn.quantize_rows(X[:, :33]), ValueError, "a multiple of 32"),
        (lambda: cupyattn.quantize_rows(X[:, :32], rotation=64), ValueError, "K = 32"),
        (lambda: cupyattn.quantize_rows(X, rotation=32), ValueError, "rotation = 32"),
        (lambda: cupyattn.quantize_rows(X, rotation="64"), TypeError, "rotation = '64'"),
        (lambda: cupyattn.quantize_rows(X.astype(np.float64)), TypeError, "float64"),
        (lambda: cupyattn.quantize_rows(X, out=X), TypeError, "it is QuantizedRows"),
        (
            lambda: cupyattn.quantize_rows(X, out=cupyattn.quantize_rows(X[:2])),
            ValueError,
            "the result is (3, 64)",
        ),
        (
            lambda: cupyattn.quantize_rows(X, out=cupyattn.quantize_rows(X, rotation=64)),
            ValueError,
            "rotation = None",
        ),
        (
            lambda: cupyattn.quantize(X.T, format="nf4", block_size=32, rotation=64),
            ValueError,
            "no others",
        ),
        (
            lambda: cupyattn.quantize(X[:, :32].T, format="int8", rotation=64),
            ValueError,
            "rotation = 64 with K = 32",
        ),
        (
            lambda: cupyattn.quantize(X.T, format="int8", rotation=64, out=PLAIN),
            ValueError,
            "out is",
        ),
        (
            lambda: QuantizedRows(np.zeros((2, 64), np.int8), np.zeros(3, np.float32)),
            ValueError,
            "scales is float32 (3,)",
        ),
        (
            lambda: QuantizedRows(np.zeros((2, 64), np.int8), np.zeros(2, np.float32), 16),
            ValueError,
            "rotation = 16",
        ),
        (
            lambda: QuantizedRows(
                np.zeros((2, 64), np.int8), np.zeros(2, np.float32), dtype="float64"
            ),
            TypeError,
            "dtype = 'float64'",
        ),
        (lambda: np.asarray(cupyattn.quantize_rows(X)), RefusalError, "as an array; products"),
        (lambda: np.from_dlpack(cupyattn.quantize_rows(X)), RefusalError, ".codes and .scales"),
    ],
)
def test_refusals_say_what_to_pass(call, kind, says):
    with cupyattn.backend("reference"), pytest.raises(kind, match=re.escape(says)):
        call()


def test_numpy_results_are_within_bounds():
    for problem in (case(5, 40, 128, "swiglu", residual=True), case(7, 9, 2112, dtype="float32")):
        x, w, b = problem.arrays()
        options = problem.keywords()
        with cupyattn.backend("reference"):
            out = cupyattn.linear(x, w, b, activations="int8", **options)
        want = cupyattn.testing.expected(
            cupyattn.linear, cupyattn.quantize_rows(x, rotation=w.rotation), w, b, **options
        )
        assert 0 < error_ratio(out, want.result, want.bound) <= 1
        loose = cupyattn.testing.expected(cupyattn.linear, x, w, b, activations="int8", **options)
        assert error_ratio(out, loose.result, loose.bound) <= 1


def test_rotations_cancel_in_the_reference():
    x = np.random.default_rng(0).standard_normal((3, 128))
    np.testing.assert_allclose(rotated(rotated(x)), x, atol=1e-14)
    np.testing.assert_allclose((rotated(x) ** 2).sum(), (x**2).sum())


def test_no_rows_are_rotated_on_numpy():
    out = cupyattn.linear(X[:0], W8, activations="int8")
    assert (out.shape, out.dtype) == ((0, 8), X.dtype)
    want = cupyattn.testing.expected(cupyattn.linear, X[:0], W8, activations="int8")
    assert want.result.shape == want.bound.shape == (0, 8)


@pytest.mark.parametrize(("arch", "native"), [(75, 0), (80, 1), (89, 1), (90, 1)])
def test_newer_devices_copy_with_cp_async(arch, native):
    kernels = [*kernels_int8.catalogue(arch)]
    assert {dict(kernel.macros)["NATIVE"] for kernel in kernels} == {native}
    tiles = {kernel.label for kernel in kernels if "Identity" in kernel.label}
    assert len(tiles) == (4 if native else 5)
