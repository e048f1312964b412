"""Products in float32 arithmetic against the float64 reference, within its derived bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_array_equal
from support.devices import KERNELS
from support.linear_problems import LinearCase, backward_ratio, forward_ratio, linear_cases, put
from support.search import deep, examples, wider

import cupyattn
from cupyattn import LinearGrads
from cupyattn.kernels.configs.linear import float32 as configs
from cupyattn.ops.linear import backward, forward

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS = wider(
    [("float32", "gelu_tanh"), ("bfloat16", "swiglu")],
    [("float32", None), ("float32", "gelu"), ("bfloat16", "relu"), ("float32", "geglu")],
)


@examples(4)
@given(case=linear_cases(KINDS))
def test_forward_within_bounds_of_the_reference(case: LinearCase):
    assert forward_ratio(case)[0] <= 1


@examples(3)
@given(case=linear_cases(KINDS))
def test_backward_within_bounds_of_the_reference(case: LinearCase):
    assert backward_ratio(case) <= 1


CASE = LinearCase((70,), 40, 72, residual=True)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        ("float32", None),
        *deep(
            ("bfloat16", "gelu"), ("float32", "silu"), ("bfloat16", "relu"), ("float32", "geglu")
        ),
    ],
)
def test_every_activation(dtype, activation):
    case = replace(CASE, dtype=dtype, activation=activation, spread=2.0)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(replace(case, turned=True)) <= 1


@pytest.mark.parametrize(
    ("sizes", "turned"),
    [
        ((64, 8, 64), False),
        ((65, 9, 257), True),  # a column more than a CTA adds up for db
        ((1, 1, 1), False),
        # More tiles of rows than neighbouring CTAs take, of dw and of out; whole tiles of columns.
        ((64, 513, 64), False),
        ((513, 64, 128), False),
        *deep(((64, 8, 64), True), ((65, 9, 129), False)),
        *deep(*(((63, 129, 40), turned) for turned in (False, True))),
    ],
)
def test_sizes_around_tiles(sizes, turned):
    rows, inner, outer = sizes
    case = LinearCase((rows,), inner, outer, activation="gelu_tanh", turned=turned)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize(
    ("rows", "dtype", "activation", "turned"),
    [
        (1, "float32", "gelu_tanh", False),
        (2, "bfloat16", None, True),
        (7, "float32", "swiglu", True),
        (16, "float32", "gelu_tanh", True),
        *deep((3, "bfloat16", "silu", False), (16, "bfloat16", "geglu", False)),
    ],
)
def test_few_rows(rows, dtype, activation, turned):
    """Whole vectors, several passes over K by all warps, a ragged end of K and of the columns."""
    for inner, outer in ((520, 40), (133, 35)):
        case = LinearCase((rows,), inner, outer, dtype, activation, turned, residual=True)
        assert forward_ratio(case)[0] <= 1


@pytest.fixture
def large_tiles(monkeypatch):
    """The first row of each table, which otherwise takes results of at least 80 tiles."""

    def first(arch, rows, columns, table=configs.PRODUCTS):
        return next(iter(table[75].values()))

    monkeypatch.setattr(configs, "product_row", first)
    forward._plan.cache_clear()
    backward._plan.cache_clear()
    yield
    forward._plan.cache_clear()
    backward._plan.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "activation", "turned"),
    [
        ("float32", "gelu_tanh", False),
        *deep(("bfloat16", "swiglu", True), ("float32", "geglu", True)),
    ],
)
def test_large_tiles(dtype, activation, turned, large_tiles):
    case = LinearCase((150,), 24, 136, dtype, activation, turned, seed=3)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize("sizes", [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_empty_axes(sizes, dtype):
    """A sum of nothing is 0: out is the bias, through the activation."""
    rows, inner, outer = sizes
    case = LinearCase((rows,), inner, outer, dtype, "gelu_tanh")
    assert forward_ratio(case)[0] <= 1
    for accumulate in (False, True):
        assert backward_ratio(replace(case, accumulate=accumulate)) <= 1


def test_gradients_have_the_same_bits_from_run_to_run():
    case = LinearCase((300,), 24, 40, activation="gelu_tanh")
    x, w, b = map(put, case.inputs())
    dout = put(case.normal("dout", 300, 40))
    first, second = (cupyattn.linear_backward(dout, x, w, b, activation="silu") for _ in range(2))
    for a, again in zip(first, second, strict=True):
        assert KERNELS.get(a).tobytes() == KERNELS.get(again).tobytes()


def test_results_are_written_in_place():
    """Into slices, with nothing beside them touched; dw into the transpose of an array."""
    case = LinearCase((5,), 9, 11, activation="gelu_tanh")
    x, w, b = map(put, case.inputs())
    wide, kept = (KERNELS.put(np.full((5, 20), 77, np.float32)) for _ in range(2))
    given = wide[:, :11], kept[:, 2:13]
    results = cupyattn.linear(x, w, b, activation="gelu_tanh", return_preactivation=True, out=given)
    assert all(result is array for result, array in zip(results, given, strict=True))
    plain = cupyattn.linear(x, w, b, activation="gelu_tanh", return_preactivation=True)
    for memory, result, columns in zip(
        (wide, kept), plain, (slice(0, 11), slice(2, 13)), strict=True
    ):
        memory = KERNELS.get(memory)
        assert_array_equal(memory[:, columns], KERNELS.get(result))
        memory[:, columns] = 77
        assert (memory == 77).all()
    dw = KERNELS.put(np.full((11, 12), 77, np.float32))
    grads = LinearGrads(None, dw[:, :9].T, None)
    dout = put(case.normal("dout", 5, 11))
    found = cupyattn.linear_backward(dout, x, w, b, grads=grads)
    expected = cupyattn.linear_backward(dout, x, w, b)
    assert_array_equal(KERNELS.get(dw)[:, :9].T, KERNELS.get(expected.dw))
    assert (KERNELS.get(dw)[:, 9:] == 77).all()
    assert found.db.shape == (11,)


def test_what_does_not_exist_is_not_read():
    """NaN behind the arrays, and in the rows of a neighbour, stays where it is."""
    case = LinearCase((33,), 13, 21, view="odd", activation="gelu_tanh")
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


def test_infinities_and_nan_reach_their_rows_alone():
    x = np.ones((3, 8), np.float32)
    x[1, 3], x[2, 5] = np.nan, -np.inf
    w = np.eye(8, dtype=np.float32)
    out = KERNELS.get(cupyattn.linear(put(x), put(w + 1), activation="gelu_tanh"))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert (out[2] == 0).all()
