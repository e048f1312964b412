"""Products of many rows with a quantised weight, on tensor cores and in float32 arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.devices import KERNELS, choose, without_tensor_cores
from support.linear_problems import (
    LinearProblem,
    backward_ratio,
    forget_plans,
    forward_ratio,
    forward_steps,
    put,
    tensor_core_alone,
)
from support.quantised_weights import of_usual_size
from support.search import deep, examples

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_quantised_tile, plan
from cupyattn.ops.linear.weight_formats import FORMATS as ALL_FORMATS
from cupyattn.ops.linear.weight_formats import NF4_CODEBOOK
from cupyattn.reference import error_ratio
from cupyattn.runtime.device.traits import DeviceTraits
from cupyattn.runtime.tuning import Asked, Choices

pytestmark = pytest.mark.nvrtc

# Those that the kernels read; of others scales are expanded before.
FORMATS = {name: form for name, form in ALL_FORMATS.items() if form.group is None}

T4 = DeviceTraits(75, 40)


def case(
    rows: int, outer: int, inner: int, weights: str, activation: str | None = None, **options: Any
) -> LinearProblem:
    return LinearProblem((rows,), inner, outer, "float16", activation, weights=weights, **options)


# At the last row and column of a tile, before and after them; the sum in one k-tile and in
# several; blocks of one k-tile, of several, and of a whole row; loads and stores by vectors, or by
# items; rows that lie apart.
FORWARD = [
    ("narrow", case(257, 129, 96, "nf4", "gelu_tanh", block_size=32, residual=True)),
    ("narrow", case(255, 72, 128, "int4", "swiglu", residual=True, view="padded")),
    ("few", case(33, 35, 64, "q4_1", "gelu", view="sliced", residual=True)),
    ("small", case(127, 65, 256, "q4_k", "silu")),
    ("small", case(260, 8, 64, "nf4")),  # CTAs whose rows do not exist
    *deep(
        ("small", case(129, 136, 32, "int8", "relu", biased=False)),
        ("few", case(65, 136, 64, "nf4", "silu", residual=True)),
        ("few", case(64, 72, 160, "int8", "swiglu", block_size=32)),
        ("small", case(3, 136, 256, "nf4", "geglu", residual=True)),
        ("small", case(130, 264, 192, "int4", block_size=64, residual=True)),
        ("narrow", case(31, 128, 576, "int8", "gelu", residual=True)),
        ("narrow", case(257, 72, 96, "int8", block_size=32)),
        ("small", case(128, 128, 160, "q4_1", "swiglu", residual=True)),
        ("narrow", case(256, 127, 256, "q4_k", "geglu", view="sliced")),
        ("narrow", case(2, 1, 64, "int4", block_size=32, seed=1)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), FORWARD, ids=str)
def test_forward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1


def test_the_codebook_of_nf4_is_rounded_to_the_nearest_float16():
    """A product with the identity matrix gives the weights, whose largest is 1."""
    w = NF4_CODEBOOK[np.add.outer(np.arange(64), np.arange(48)) % 16]
    with KERNELS.running(), tensor_core_alone("small"):
        quantised = cupyattn.quantize(KERNELS.put(w), format="nf4")
        out = cupyattn.linear(KERNELS.put(np.eye(64, dtype=np.float16)), quantised)
    assert_array_equal(KERNELS.get(out), w.astype(np.float16))


# w whose rows of codes are its rows: the product of dx, as people call it themselves. Its sum is
# over rows of codes, as many as there are; its columns are whole runs of codes.
ACROSS = [
    ("narrow", case(65, 160, 33, "nf4", transposed=True, biased=False)),
    ("few", case(3, 256, 70, "q4_k", "gelu", transposed=True, residual=True)),
    # The residual and the result have different strides and alignments.
    ("small", case(3, 64, 33, "int8", transposed=True, biased=False, view="sliced", residual=True)),
    *deep(
        ("small", case(130, 96, 31, "int4", transposed=True, block_size=32, residual=True)),
        (
            "small",
            case(70, 64, 40, "nf4", transposed=True, biased=False, view="padded", residual=True),
        ),
        ("small", case(16, 96, 2, "int8", transposed=True, biased=False, seed=1)),
        ("narrow", case(257, 32, 64, "q4_1", "swiglu", transposed=True, view="sliced")),
        ("narrow", case(70, 1056, 40, "int8", transposed=True, block_size=32)),
        ("small", case(129, 128, 65, "nf4", "geglu", transposed=True, residual=True)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), ACROSS, ids=str)
def test_blocks_along_the_columns_are_within_bounds(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1


BACKWARD = [
    ("narrow", case(70, 129, 160, "nf4", "gelu")),
    ("small", case(130, 72, 128, "int4", "swiglu", accumulate=True)),
    *deep(
        ("narrow", case(1, 70, 96, "int8", biased=False, accumulate=True)),
        ("few", case(65, 33, 256, "q4_k", "silu", given=False)),
        ("few", case(7, 200, 192, "nf4", "relu", accumulate=True)),
        ("small", case(257, 40, 96, "q4_1", "relu", view="sliced")),
        (
            "narrow",
            case(33, 64, 96, "nf4", "geglu", transposed=True, block_size=32, accumulate=True),
        ),
        ("small", case(16, 264, 384, "int4", given=False)),
        ("narrow", case(31, 96, 65, "int8", "gelu_tanh", transposed=True, biased=False)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), BACKWARD, ids=str)
def test_backward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < backward_ratio(problem) <= 1


def launches_of(problem: LinearProblem, traits: DeviceTraits) -> tuple[tuple[str, int], ...]:
    """Return the kernels of a forward on a device, with their grids."""
    with tensor_core_alone():
        steps = forward_steps(*problem.arrays(), problem.activation, traits)
    return tuple((step.specialisation.label, step.ctas) for step in steps)


def steps_of(problem: LinearProblem) -> tuple[str, ...]:
    """Return the kernels of a forward on a T4."""
    return tuple(label.partition("[")[0] for label, _ in launches_of(problem, T4))


@pytest.mark.parametrize(
    "problem",
    [
        case(70, 72, 2048, "nf4", "geglu", residual=True),
        *deep(case(17, 64, 2051, "int4", transposed=True)),
        *deep(case(130, 264, 2304, "q4_k", biased=False), case(65, 33, 4128, "int8", "silu")),
    ],
    ids=str,
)
def test_a_long_sum_of_few_results_is_split(problem):
    assert steps_of(problem) == ("linear_product_quantised", "linear_split_sums")
    with KERNELS.running(), tensor_core_alone():
        assert 0 < forward_ratio(problem)[0] <= 1


@pytest.mark.parametrize("shape", ["few", *deep("narrow", "small")])
def test_sum_split_in_three_is_within_bounds(shape):
    """Four places are reserved for three parts; the last stays empty."""
    problem = case(70, 64, 1536, "nf4", transposed=True, biased=False)
    with KERNELS.running(), tensor_core_alone(shape, splits=3):
        assert 0 < forward_ratio(problem)[0] <= 1


def test_split_sum_has_no_empty_part():
    """16416 items in 32 parts of whole runs would leave two without any."""
    problem = case(40, 32, 16416, "int8", transposed=True, biased=False)
    assert steps_of(problem) == ("linear_product_quantised", "linear_split_sums")
    with KERNELS.running(), tensor_core_alone():
        assert 0 < forward_ratio(problem)[0] <= 1


@pytest.mark.deep
@pytest.mark.parametrize(
    "problem",
    [case(256, 256, 64, "nf4", "gelu"), case(256, 512, 200, "nf4", transposed=True, biased=False)],
    ids=str,
)
def test_tuned_tiling_is_used(problem, monkeypatch):
    """Any candidate of `cupyattn tune` gives right results."""
    with KERNELS.running(), tensor_core_alone():
        traits, asked = KERNELS.device.traits, Asked()
        usual = launches_of(problem, traits._replace(choices=asked))
        (asks,) = asked.questions
        others = [
            launches_of(problem, traits._replace(choices=Choices({asks.text: name})))
            for name in asks.among
        ]
        assert others[0] == usual
        assert len({*others}) == len(others) > 1
        choose(monkeypatch, asks.text, asks.among[-1])
        assert 0 < forward_ratio(problem)[0] <= 1


@examples(4)
@given(st.data())
@pytest.mark.deep
def test_drawn_problems(data):
    weights = data.draw(st.sampled_from([*FORMATS]))
    unit = (
        256 if weights == "q4_k" else 128 if weights == "int4" else 64 if weights == "nf4" else 32
    )
    lines, codes = data.draw(st.integers(1, 300)), unit * data.draw(st.integers(1, 3))
    activation = data.draw(st.sampled_from((None, "gelu_tanh", "swiglu")))
    gated, transposed = activation == "swiglu", data.draw(st.booleans())
    outer, inner = (codes, lines) if transposed else (lines, codes)
    problem = case(
        data.draw(st.integers(1, 300)),
        outer // 2 if gated and transposed else outer,
        inner,
        weights,
        activation,
        transposed=transposed,
        view=data.draw(st.sampled_from(("contiguous", "padded", "sliced"))),
        residual=data.draw(st.booleans()),
        biased=data.draw(st.booleans()),
        accumulate=data.draw(st.booleans()),
        given=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    shape = data.draw(st.sampled_from(("narrow", "small", "few")))
    with KERNELS.running(), tensor_core_alone(shape):
        assert forward_ratio(problem)[0] <= 1
        assert backward_ratio(problem) <= 1


def product(x: np.ndarray, w: QuantizedWeight) -> np.ndarray:
    with KERNELS.running(), tensor_core_alone("small"):
        return KERNELS.get(cupyattn.linear(put(x), put(w)))


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((70, 256)).astype(np.float16)


def ratio_of(x: np.ndarray, w: QuantizedWeight) -> float:
    """The error of their product over its bound."""
    exact = reference.linear(x.astype(np.float64), w)[0]
    return error_ratio(product(x, w), exact, reference.linear_bound(x, w, dtype="float16")[0])


@pytest.mark.parametrize("weights", ["nf4", *deep("int4", "int8", "q4_1", "q4_k")])
def test_slices_of_rows(weights, x):
    """A slice starts at any row. Rows around it hold NaN, which stays out."""
    rows = of_usual_size(weights, 72, 256, FORMATS[weights].block_size or 256).T
    place = rows.scales if rows.super_scales is None else rows.super_scales
    place[12], place[53] = np.nan, np.nan
    assert 0 < ratio_of(x, rows[13:53].T) <= 1
    assert 0 < ratio_of(x[:, :40], rows[13:53]) <= 1


@pytest.mark.parametrize("weights", ["nf4", *deep("int8", "int4", "q4_1", "q4_k")])
def test_nan_scale_affects_only_its_column(weights, x):
    w = of_usual_size(weights, 72, 256, FORMATS[weights].block_size or 256)
    clean = product(x, w)
    place = w.scales if w.super_scales is None else w.super_scales
    place[71] = np.nan
    found = product(x, w)
    assert np.isnan(found[:, 71]).all()
    np.testing.assert_array_equal(found[:, :71], clean[:, :71])
    dout = np.ones((70, 72), np.float16)
    assert np.isnan(product(dout, w.T)).all()
    dout[:, 71] = 0
    assert np.isnan(product(dout, w.T)).all()
    assert not np.isnan(product(dout[:, :64], w.T[:64])).any()


def test_nan_row_of_x_affects_only_its_row(x):
    w = of_usual_size("nf4", 72, 256, 64)
    clean = product(x, w)
    x[69] = np.nan
    found = product(x, w)
    assert np.isnan(found[69]).all()
    np.testing.assert_array_equal(found[:69], clean[:69])


@pytest.mark.parametrize("scale", [2.0**-24, 4000.0, *deep(6e-5, 1.0)])
@pytest.mark.parametrize("weights", ["nf4", *deep("int8", "int4", "q4_1")])
def test_scales_of_all_sizes(weights, scale):
    """Scales go from the least float16 to one that makes the largest float16 weights."""
    problem = case(65, 40, 128, weights, block_size=None if weights == "int8" else 32)
    problem = replace(problem, biased=False, spread=2.0**-10 if scale > 1 else 1.0)
    x, w, _ = problem.arrays()
    first = w.scales[..., 0] if w.scales.ndim == 3 else w.scales
    first[...] = scale / (128 if weights == "int8" else 1)
    assert ratio_of(x, w) <= 1


def test_linear_gelu_and_vjp_accept_a_quantised_weight():
    x, w, b = case(65, 40, 128, "nf4", "gelu_tanh").arrays()
    with cupyattn.backend("reference"):
        out, pullback = cupyattn.vjp(cupyattn.linear_gelu, x, w, b)
        dx, dw, db = pullback(out)
        grads = cupyattn.linear_gelu_backward(out, x, w, b)
    assert dw is None and grads.dw is None
    assert dx.shape == x.shape and db.shape == b.shape


def test_linear_cross_entropy_accepts_a_quantised_weight():
    """Chunks give the loss of all logits and the dx of their gradient."""
    rng = np.random.default_rng(0)
    x, w, _ = case(130, 72, 128, "nf4").arrays()
    x, labels = put(x / 8), KERNELS.put(rng.integers(0, 72, 130).astype(np.int32))
    w, dloss = put(w), KERNELS.put(np.ones((), np.float32))
    with KERNELS.running(), tensor_core_alone("small"):
        some = {"logits_bytes": 2 * 72 * 50}
        loss, lse = cupyattn.linear_cross_entropy(x, w, labels, return_lse=True, **some)
        dx, dw = cupyattn.linear_cross_entropy_backward(dloss, x, w, labels, lse, **some)
        logits = cupyattn.linear(x, w)
        expected, _ = cupyattn.cross_entropy(logits, labels, return_lse=True)
        dlogits = cupyattn.cross_entropy_backward(dloss, logits, labels, lse)
        of_all = cupyattn.linear(dlogits, w.T)
    assert dw is None
    np.testing.assert_allclose(KERNELS.get(loss), KERNELS.get(expected), rtol=1e-5)
    np.testing.assert_allclose(KERNELS.get(dx), KERNELS.get(of_all), rtol=2e-3, atol=1e-6)


# Of a row of codes that lies along the sum a k-tile has half a sector, of its scales one number;
# the next k-tiles have the rest, which L1 keeps. Across the sum a sector of codes comes at once.
LEAST = {False: 0.65, True: 0.88}


@pytest.mark.parametrize(
    ("shape", "weights", "transposed"),
    [
        ("narrow", "nf4", False),
        *deep(
            ("small", "int8", True),
            ("narrow", "int8", False),
            ("narrow", "nf4", True),
            ("small", "q4_k", False),
            ("small", "int4", True),
            ("narrow", "q4_1", True),
            ("small", "int4", False),
        ),
    ],
)
def test_no_bank_conflicts_and_few_sectors(shape, weights, transposed):
    inner, outer = (256, 512) if transposed else (512, 256)
    case = LinearProblem(
        (256,), inner, outer, "float16", None, transposed, weights=weights, biased=False
    )
    x, w, _ = case.arrays()
    report = Report()
    with cupyattn.backend("emulator", report=report), tensor_core_alone(shape):
        cupyattn.linear(x, w, activation=None if transposed else "gelu_tanh")
    assert report.instruction_mix["tensor"] > 0
    assert {access.worst for access in report.accesses if access.space == "shared"} == {1.0}
    assert report.sector_efficiency >= LEAST[transposed]


@contextmanager
def float32_alone() -> Iterator[None]:
    """Inside, products with few rows too are computed by the float32 tiles."""
    tiled = [each for each in kernels_quantised_tile.PLANS if not each.tensor_cores]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "QUANTISED_PLANS", tiled)
        forget_plans()
        yield
    forget_plans()


def float_case(
    rows: int, outer: int, inner: int, weights: str, activation: str | None = None, **options: Any
) -> LinearProblem:
    dtype = options.pop("dtype", "float32")
    return LinearProblem((rows,), inner, outer, dtype, activation, weights=weights, **options)


FLOAT_PROBLEMS = [
    float_case(70, 65, 64, "nf4", "gelu", residual=True),
    float_case(65, 128, 31, "int8", "swiglu", transposed=True, view="sliced"),
    float_case(64, 33, 256, "q4_k", accumulate=True),
    # A second group of eight tiles of rows, and whole tiles of columns.
    float_case(530, 64, 64, "int4", block_size=32, accumulate=True),
    *deep(
        float_case(1, 64, 35, "int8", transposed=True, biased=False),
        float_case(65, 128, 31, "nf4", "swiglu", transposed=True, view="sliced"),
        float_case(33, 40, 96, "int4", "swiglu", dtype="bfloat16"),
        float_case(129, 72, 32, "q4_1", "relu", view="sliced", residual=True),
        float_case(16, 129, 576, "int8", "gelu", dtype="bfloat16", residual=True),
        float_case(70, 512, 33, "q4_k", "gelu", transposed=True, dtype="bfloat16"),
        float_case(40, 160, 7, "q4_1", transposed=True, accumulate=True),
        float_case(31, 96, 65, "int4", "relu", transposed=True, given=False),
    ),
]


@pytest.mark.parametrize("problem", FLOAT_PROBLEMS, ids=str)
@float32_alone()
def test_float32_forward_and_backward(problem):
    with KERNELS.running():
        assert 0 < forward_ratio(problem)[0] <= 1
        assert 0 < backward_ratio(problem) <= 1


@pytest.mark.deep
@pytest.mark.parametrize("weights", ["int4", "nf4", "int8", "q4_1", "q4_k"])
@float32_alone()
def test_float16_without_tensor_cores(weights):
    with without_tensor_cores():
        problem = float_case(70, 72, 256, weights, "gelu", dtype="float16", residual=True)
        assert 0 < forward_ratio(problem)[0] <= 1
        assert 0 < backward_ratio(problem) <= 1


@examples(4)
@given(st.data())
@pytest.mark.deep
@float32_alone()
def test_drawn_problems_in_float32(data):
    weights = data.draw(st.sampled_from([*FORMATS]))
    unit = 256 if weights == "q4_k" else 32
    lines, codes = data.draw(st.integers(1, 140)), unit * data.draw(st.integers(1, 5))
    activation = data.draw(st.sampled_from((None, "gelu", "swiglu")))
    transposed = data.draw(st.booleans())
    outer, inner = (codes, lines) if transposed else (lines, codes)
    halves = 2 if activation == "swiglu" and transposed else 1
    problem = float_case(
        data.draw(st.integers(1, 140)),
        outer // halves,
        inner,
        weights,
        activation,
        transposed=transposed,
        dtype=data.draw(st.sampled_from(("float32", "bfloat16"))),
        view=data.draw(st.sampled_from(("contiguous", "padded", "sliced"))),
        residual=data.draw(st.booleans()),
        biased=data.draw(st.booleans()),
        accumulate=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    with KERNELS.running():
        assert forward_ratio(problem)[0] <= 1
        assert backward_ratio(problem) <= 1


@pytest.mark.parametrize("transposed", [False, *deep(True)])
@float32_alone()
def test_float32_has_no_bank_conflicts(transposed):
    """Each entry of the codebook has a separate bank."""
    inner, outer = (64, 256) if transposed else (256, 64)
    problem = float_case(128, outer, inner, "nf4", transposed=transposed, biased=False)
    x, w, _ = problem.arrays()
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(x, w)
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} == {1.0}
