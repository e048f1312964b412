"""Products of many rows with a quantised weight on tensor cores, within their derived bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support.choices import choose
from support.devices import KERNELS
from support.linear_problems import LinearCase, backward_ratio, forward_ratio, put
from support.quantised_weights import of_usual_size
from support.search import deep, examples
from support.tensor_core_linear import tensor_core_alone

import cupyattn
from cupyattn import QuantizedWeight, reference
from cupyattn.arrays import adopt
from cupyattn.functional.linear.weights import weight_arrays
from cupyattn.kernels.card import Card
from cupyattn.kernels.choices import Asked, Choices
from cupyattn.ops.linear import quantised_tile
from cupyattn.ops.linear.checks import forward_problem
from cupyattn.reference import error_ratio
from cupyattn.weight_formats import FORMATS as ALL_FORMATS
from cupyattn.weight_formats import NF4_CODEBOOK

# Those that the kernels read; of others scales are expanded before.
FORMATS = {name: form for name, form in ALL_FORMATS.items() if form.group is None}
pytestmark = pytest.mark.nvrtc

T4 = Card(75, 40)


def case(
    rows: int, outer: int, inner: int, weights: str, activation: str | None = None, **options: Any
) -> LinearCase:
    return LinearCase((rows,), inner, outer, "float16", activation, weights=weights, **options)


# At the last row and column of a tile, before and behind them; the sum in one k-tile and in
# several; blocks of one k-tile, of several, and of a whole row; loads and stores by vectors, or by
# items; rows that lie apart.
FORWARD = [
    ("narrow", case(257, 129, 96, "nf4", "gelu_tanh", block_size=32, residual=True)),
    ("narrow", case(255, 72, 128, "int4", "swiglu", residual=True, view="padded")),
    ("small", case(129, 136, 32, "int8", "relu", biased=False)),
    ("narrow", case(33, 35, 64, "q4_1", "gelu", view="odd", residual=True)),
    ("small", case(127, 65, 512, "q4_k", "silu")),
    ("few", case(65, 136, 64, "nf4", "silu", residual=True)),
    ("small", case(260, 8, 64, "nf4")),  # CTAs whose rows do not exist
    *deep(
        ("few", case(64, 72, 160, "int8", "swiglu", block_size=32)),
        ("small", case(3, 136, 256, "nf4", "geglu", residual=True)),
        ("small", case(130, 264, 192, "int4", block_size=64, residual=True)),
        ("narrow", case(31, 128, 576, "int8", "gelu", residual=True)),
        ("narrow", case(257, 72, 96, "int8", block_size=32)),
        ("small", case(128, 128, 160, "q4_1", "swiglu", residual=True)),
        ("narrow", case(256, 127, 256, "q4_k", "geglu", view="odd")),
        ("narrow", case(2, 1, 64, "int4", block_size=32, seed=1)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), FORWARD, ids=str)
def test_forward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1


def test_the_codebook_of_nf4_is_rounded_to_the_nearest_float16():
    """A product of the identity shows the weights themselves; the largest of each block is 1."""
    w = NF4_CODEBOOK[np.add.outer(np.arange(64), np.arange(48)) % 16]
    with KERNELS.running(), tensor_core_alone("small"):
        quantised = cupyattn.quantize(KERNELS.put(w), format="nf4")
        out = cupyattn.linear(KERNELS.put(np.eye(64, dtype=np.float16)), quantised)
    assert_array_equal(KERNELS.get(out), w.astype(np.float16))


# w whose rows of codes are its rows: the product of dx, as people call it themselves. Its sum is
# over rows of codes, as many as there are; its columns are whole runs of codes.
ACROSS = [
    ("narrow", case(65, 160, 33, "nf4", turned=True, biased=False)),
    ("small", case(130, 96, 31, "int4", turned=True, biased=False, block_size=32, residual=True)),
    ("few", case(3, 256, 70, "q4_k", "gelu", turned=True, residual=True)),
    # A residual that lies otherwise than the result: strides and accesses are each's own.
    ("small", case(70, 64, 40, "nf4", turned=True, biased=False, view="padded", residual=True)),
    ("small", case(3, 64, 33, "int8", turned=True, biased=False, view="odd", residual=True)),
    *deep(
        ("small", case(16, 96, 2, "int8", turned=True, biased=False, seed=1)),
        ("narrow", case(257, 32, 64, "q4_1", "swiglu", turned=True, view="odd")),
        ("narrow", case(70, 1056, 40, "int8", turned=True, block_size=32)),
        ("small", case(129, 128, 65, "nf4", "geglu", turned=True, residual=True)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), ACROSS, ids=str)
def test_a_weight_whose_blocks_lie_along_the_columns(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < forward_ratio(problem)[0] <= 1


BACKWARD = [
    ("narrow", case(70, 129, 160, "nf4", "gelu")),
    ("small", case(130, 72, 128, "int4", "swiglu", accumulate=True)),
    ("narrow", case(1, 70, 96, "int8", biased=False, accumulate=True)),
    ("few", case(65, 33, 256, "q4_k", "silu", given=False)),
    *deep(
        ("few", case(7, 200, 192, "nf4", "relu", accumulate=True)),
        ("small", case(257, 40, 96, "q4_1", "relu", view="odd")),
        ("narrow", case(33, 64, 96, "nf4", "geglu", turned=True, block_size=32, accumulate=True)),
        ("small", case(16, 264, 384, "int4", given=False)),
        ("narrow", case(31, 96, 65, "int8", "gelu_tanh", turned=True, biased=False)),
    ),
]


@pytest.mark.parametrize(("shape", "problem"), BACKWARD, ids=str)
def test_backward(shape, problem):
    with KERNELS.running(), tensor_core_alone(shape):
        assert 0 < backward_ratio(problem) <= 1


def launches_of(problem: LinearCase, card: Card) -> tuple[tuple[str, int], ...]:
    """The kernels of a forward on a card, with their grids."""
    x, w, b = problem.inputs()
    arrays, form = weight_arrays(w)
    described = forward_problem(adopt({"x": x, **arrays, "b": b}), problem.activation, False, form)
    steps = quantised_tile.forward_launches(described, card).steps
    return tuple((step.specialisation.label, step.ctas) for step in steps)


def steps_of(problem: LinearCase) -> tuple[str, ...]:
    """The kernels of a forward on a T4."""
    return tuple(label.partition("[")[0] for label, _ in launches_of(problem, T4))


@pytest.mark.parametrize(
    "problem",
    [
        case(70, 72, 2048, "nf4", "geglu", residual=True),
        case(17, 64, 2051, "int4", turned=True),
        *deep(case(130, 264, 2304, "q4_k", biased=False), case(65, 33, 4128, "int8", "silu")),
    ],
    ids=str,
)
def test_a_long_sum_of_few_results_is_split(problem):
    assert steps_of(problem) == ("linear_product_quantised", "linear_split_sums")
    with KERNELS.running(), tensor_core_alone():
        assert 0 < forward_ratio(problem)[0] <= 1


@pytest.mark.parametrize("shape", ["few", *deep("narrow", "small")])
def test_three_parts_of_a_sum_have_a_place_that_is_empty(shape):
    """It would begin right behind the sum."""
    problem = case(70, 64, 1536, "nf4", turned=True, biased=False)
    with KERNELS.running(), tensor_core_alone(shape, splits=3):
        assert 0 < forward_ratio(problem)[0] <= 1


def test_parts_of_a_sum_are_none_of_them_empty():
    """16416 items in 32 parts of whole runs would leave two without any."""
    problem = case(40, 32, 16416, "int8", turned=True, biased=False)
    assert steps_of(problem) == ("linear_product_quantised", "linear_split_sums")
    with KERNELS.running(), tensor_core_alone():
        assert 0 < forward_ratio(problem)[0] <= 1


@pytest.mark.deep
@pytest.mark.parametrize(
    "problem",
    [
        case(256, 256, 64, "nf4", "gelu"),
        case(256, 512, 200, "nf4", turned=True, biased=False),
    ],
    ids=str,
)
def test_a_tiling_that_was_tuned_is_taken(problem, monkeypatch):
    """Whatever else `cupyattn tune` may find fastest is right too."""
    with KERNELS.running(), tensor_core_alone():
        card, asked = KERNELS.device.card, Asked()
        usual = launches_of(problem, card._replace(choices=asked))
        (asks,) = asked.questions
        others = [
            launches_of(problem, card._replace(choices=Choices({asks.text: name})))
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
    gated, turned = activation == "swiglu", data.draw(st.booleans())
    outer, inner = (codes, lines) if turned else (lines, codes)
    problem = case(
        data.draw(st.integers(1, 300)), outer // 2 if gated and turned else outer, inner, weights,
        activation, turned=turned, view=data.draw(st.sampled_from(("contiguous", "padded", "odd"))),
        residual=data.draw(st.booleans()), biased=data.draw(st.booleans()),
        accumulate=data.draw(st.booleans()), given=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
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
    """A slice starts at any row; those around it stay out, whatever they hold."""
    rows = of_usual_size(weights, 72, 256, FORMATS[weights].block_size or 256).T
    place = rows.scales if rows.super_scales is None else rows.super_scales
    place[12], place[50] = np.nan, np.nan
    assert 0 < ratio_of(x, rows[13:50].T) <= 1
    assert 0 < ratio_of(x[:, :37], rows[13:50]) <= 1


@pytest.mark.parametrize("weights", ["nf4", *deep("int8", "int4", "q4_1", "q4_k")])
def test_a_scale_that_is_not_a_number_stays_in_its_column(weights, x):
    w = of_usual_size(weights, 70, 256, FORMATS[weights].block_size or 256)
    clean = product(x, w)
    place = w.scales if w.super_scales is None else w.super_scales
    place[69] = np.nan
    found = product(x, w)
    assert np.isnan(found[:, 69]).all()
    np.testing.assert_array_equal(found[:, :69], clean[:, :69])
    dout = np.ones((70, 70), np.float16)
    assert np.isnan(product(dout, w.T)).all()
    dout[:, 69] = 0
    assert np.isnan(product(dout, w.T)).all()
    assert not np.isnan(product(dout[:, :69], w.T[:69])).any()


def test_rows_of_x_that_are_not_numbers_stay_in_their_rows(x):
    w = of_usual_size("int4", 72, 256, 128)
    clean = product(x, w)
    x[69] = np.nan
    found = product(x, w)
    assert np.isnan(found[69]).all()
    np.testing.assert_array_equal(found[:69], clean[:69])


@pytest.mark.parametrize("scale", [2.0**-24, 6e-5, 1.0, 4000.0])
@pytest.mark.parametrize("weights", ["nf4", "int8", *deep("int4", "q4_1")])
def test_scales_of_all_sizes(weights, scale):
    """As small as float16 has numbers, and so large that it has just the largest weights."""
    problem = case(65, 40, 128, weights, block_size=None if weights == "int8" else 32)
    problem = replace(problem, biased=False, spread=2.0**-10 if scale > 1 else 1.0)
    x, w, _ = problem.inputs()
    first = w.scales[..., 0] if w.scales.ndim == 3 else w.scales
    first[...] = scale / (128 if weights == "int8" else 1)
    assert ratio_of(x, w) <= 1


def test_linear_gelu_and_vjp_take_one():
    problem = case(65, 40, 128, "nf4", "gelu_tanh")
    x, w, b = map(put, problem.inputs())
    with KERNELS.running():
        out, pullback = cupyattn.vjp(cupyattn.linear_gelu, x, w, b)
        dx, dw, db = pullback(out)
        grads = cupyattn.linear_gelu_backward(out, x, w, b)
    assert dw is None and grads.dw is None
    assert dx.shape == x.shape and db.shape == b.shape


def test_linear_cross_entropy_takes_one():
    """A chunk at a time: the loss of all logits, and the dx of their gradient."""
    rng = np.random.default_rng(0)
    x, w, _ = case(130, 72, 128, "nf4").inputs()
    x, labels = put(x / 8), KERNELS.put(rng.integers(0, 72, 130).astype(np.int32))
    w, dloss = put(w), KERNELS.put(np.ones((), np.float32))
    with KERNELS.running(), tensor_core_alone("small"):
        some = {"logits_bytes": 2 * 72 * 50}
        loss, lse = cupyattn.linear_cross_entropy(x, w, labels, return_lse=True, **some)
        dx, dw = cupyattn.linear_cross_entropy_backward(dloss, x, w, labels, lse, **some)
        logits = cupyattn.linear(x, w)
        expected = cupyattn.cross_entropy(logits, labels)
        dlogits = cupyattn.cross_entropy_backward(dloss, logits, labels, lse)
        of_all = cupyattn.linear(dlogits, w.T)
    assert dw is None
    np.testing.assert_allclose(KERNELS.get(loss), KERNELS.get(expected), rtol=1e-5)
    np.testing.assert_allclose(KERNELS.get(dx), KERNELS.get(of_all), rtol=2e-3, atol=1e-6)
