"""Products in float32 arithmetic: within bounds, with their memory accesses, for float16 too."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_array_equal
from support.devices import KERNELS, without_tensor_cores
from support.linear_problems import (
    LinearProblem,
    backward_ratio,
    forget_plans,
    forward_ratio,
    linear_problems,
    put,
)
from support.search import deep, examples, mostly_deep

import cupyattn
from cupyattn import LinearGrads
from cupyattn.emulator import Report
from cupyattn.ops.linear import kernels_float32 as configs

pytestmark = [pytest.mark.nvrtc, pytest.mark.usefixtures("kernels_run")]

KINDS = [
    ("float32", "gelu_tanh"), ("bfloat16", "swiglu"), ("float32", None), ("float32", "gelu"),
    ("bfloat16", "relu"), ("float32", "geglu"),
]  # fmt: skip


@pytest.mark.deep
@examples(4)
@given(case=linear_problems(KINDS))
def test_forward_within_bounds_of_the_reference(case: LinearProblem):
    assert forward_ratio(case)[0] <= 1


@pytest.mark.deep
@examples(3)
@given(case=linear_problems(KINDS))
def test_backward_within_bounds_of_the_reference(case: LinearProblem):
    assert backward_ratio(case) <= 1


CASE = LinearProblem((70,), 40, 72, residual=True)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        *deep(
            ("bfloat16", "swiglu"),
            ("float32", None),
            ("bfloat16", "gelu"),
            ("float32", "silu"),
            ("bfloat16", "relu"),
            ("float32", "geglu"),
        )
    ],
)
def test_activations_are_within_bounds(dtype, activation):
    case = replace(CASE, dtype=dtype, activation=activation, spread=2.0)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(replace(case, transposed=True)) <= 1


@pytest.mark.parametrize(
    ("sizes", "transposed"),
    [
        ((64, 8, 64), False),
        ((65, 9, 257), False),  # a column more than a CTA adds up for db
        ((1, 1, 1), False),
        # More than 8 tiles of rows, in dw and in out and dx; whole tiles of columns.
        ((64, 520, 64), False),
        ((513, 64, 128), False),
        *deep(((64, 513, 64), False), ((513, 8, 128), False)),
        *deep(((65, 9, 257), True), ((64, 8, 64), True), ((65, 9, 129), False)),
        *deep(*(((63, 129, 40), transposed) for transposed in (False, True))),
    ],
)
def test_sizes_around_tiles_are_within_bounds(sizes, transposed):
    rows, inner, outer = sizes
    case = LinearProblem((rows,), inner, outer, activation="gelu_tanh", transposed=transposed)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize(
    ("rows", "dtype", "activation", "transposed"),
    [
        (1, "float32", "gelu_tanh", False),
        (7, "float32", "swiglu", True),
        *deep((2, "bfloat16", None, True), (16, "float32", "gelu_tanh", True)),
        *deep((3, "bfloat16", "silu", False), (16, "bfloat16", "geglu", False)),
    ],
)
def test_few_rows(rows, dtype, activation, transposed):
    """Whole vectors, several passes over K by all warps, a ragged end of K and of the columns."""
    for inner, outer in ((520, 40), (133, 35)):
        case = LinearProblem((rows,), inner, outer, dtype, activation, transposed, residual=True)
        assert forward_ratio(case)[0] <= 1


@pytest.fixture
def large_tiles(monkeypatch):
    """Use the first configuration of each table, which is for results of at least 80 tiles."""

    def first(arch, rows, columns, table=configs.PRODUCTS):
        return next(iter(table[75].values()))

    monkeypatch.setattr(configs, "product_config", first)
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize(
    ("dtype", "activation", "transposed"),
    [
        ("float32", "gelu_tanh", False),
        *deep(("bfloat16", "swiglu", True), ("float32", "geglu", True)),
    ],
)
def test_large_tiles_are_within_bounds(dtype, activation, transposed, large_tiles):
    case = LinearProblem((150,), 24, 136, dtype, activation, transposed, seed=3)
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize("sizes", [(0, 8, 8), (5, 0, 8), (5, 8, 0)])
@pytest.mark.parametrize("dtype", ["float32", *deep("float16")])
def test_empty_axes_give_the_bias_and_zero_gradients(sizes, dtype):
    """A sum of nothing is 0: out is the bias, through the activation."""
    rows, inner, outer = sizes
    case = LinearProblem((rows,), inner, outer, dtype, "gelu_tanh")
    assert forward_ratio(case)[0] <= 1
    for accumulate in (False, True):
        assert backward_ratio(replace(case, accumulate=accumulate)) <= 1


def test_gradients_repeat_their_bits():
    case = LinearProblem((130,), 8, 64)
    x, w, b = map(put, case.arrays())
    given = put(case.normal("dout", 130, 64)), x, w, b
    first, second = (cupyattn.linear_backward(*given, activation="gelu_tanh") for _ in range(2))
    for a, again in zip(first, second, strict=True):
        assert KERNELS.get(a).tobytes() == KERNELS.get(again).tobytes()


def test_results_are_written_in_place():
    """Results go into slices, dw into the transpose of an array. Nothing else is written."""
    case = LinearProblem((5,), 9, 11)
    x, w, b = map(put, case.arrays())
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
    found = cupyattn.linear_backward(dout, x, w, b, activation="gelu_tanh", grads=grads)
    expected = cupyattn.linear_backward(dout, x, w, b, activation="gelu_tanh")
    assert_array_equal(KERNELS.get(dw)[:, :9].T, KERNELS.get(expected.dw))
    assert (KERNELS.get(dw)[:, 9:] == 77).all()
    assert found.db.shape == (11,)


def test_nan_around_the_arrays_stays_out():
    """NaN surrounds every row of the arrays."""
    case = LinearProblem((33,), 13, 21, view="sliced", activation="gelu_tanh")
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


def test_infinities_and_nan_affect_only_their_rows():
    x = np.ones((3, 8), np.float32)
    x[1, 3], x[2, 5] = np.nan, -np.inf
    w = np.eye(8, dtype=np.float32)
    out = KERNELS.get(cupyattn.linear(put(x), put(w + 1), activation="gelu_tanh"))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()
    assert (out[2] == 0).all()


def require_frugal(report: Report, wasteful: set[str]) -> None:
    """No bank conflicts, no sector fetched for a part of it but in those files."""
    shared = [access for access in report.accesses if access.space == "shared"]
    assert {access.worst for access in shared} <= {1.0}
    partly = {
        Path(access.instruction.location[0]).name
        for access in report.accesses
        if access.space == "global" and access.efficiency < 1
    }
    assert partly == wasteful


@pytest.mark.parametrize(
    ("rows", "transposed"), mostly_deep(product((8, 64), (False, True)), [(8, False), (64, False)])
)
@pytest.mark.parametrize("dtype", ["float32", *deep("bfloat16")])
def test_forward_wastes_no_memory_access(rows, transposed, dtype):
    case = LinearProblem((rows,), 256, 64, dtype, "gelu_tanh", transposed)
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear(*case.arrays(), activation="gelu_tanh")
    require_frugal(report, set())
    assert report.sector_efficiency == 1


@pytest.mark.parametrize("transposed", [False, *deep(True)])
@pytest.mark.parametrize("dtype", ["float32", *deep("bfloat16")])
def test_backward_wastes_no_memory_access(transposed, dtype):
    """Each thread of db stores eight sums of bfloat16 columns in two pieces of 16 bytes."""
    case = LinearProblem((64,), 64, 128, dtype, "gelu_tanh", transposed)
    x, w, b = case.arrays()
    dout, z = (case.normal(name, 64, 128) for name in ("dout", "z"))
    report = Report()
    with cupyattn.backend("emulator", report=report):
        cupyattn.linear_backward(
            dout,
            x,
            w,
            b,
            activation="gelu_tanh",
            preactivation=z,
            grads=LinearGrads(dw=case.weight("dw")),
        )
    require_frugal(report, {"memory.cuh"} if dtype == "bfloat16" else set())
    assert report.sector_efficiency > 0.95


FLOAT16_KINDS = [("float16", name) for name in ("gelu_tanh", "swiglu", "relu", None)]


TILES = LinearProblem((70,), 24, 72, "float16", "swiglu", residual=True)


@pytest.mark.parametrize(
    "case", [TILES, *deep(replace(TILES, transposed=True, activation="geglu"))]
)
@without_tensor_cores()
def test_tiles_without_tensor_cores(case: LinearProblem):
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.deep
@examples(14)
@given(case=linear_problems(FLOAT16_KINDS))
@without_tensor_cores()
def test_within_bounds_without_tensor_cores(case: LinearProblem):
    assert forward_ratio(case)[0] <= 1
    assert backward_ratio(case) <= 1


@pytest.mark.parametrize("rows", [1, *deep(3, 16, 17, 200)])
@pytest.mark.parametrize("transposed", [False, *deep(True)])
@without_tensor_cores()
def test_few_rows_without_tensor_cores(rows: int, transposed: bool):
    """One row has a kernel that never uses tensor cores; it splits a long K."""
    case = LinearProblem((rows,), 2056, 40, "float16", None, transposed, residual=True)
    assert forward_ratio(case)[0] <= 1
