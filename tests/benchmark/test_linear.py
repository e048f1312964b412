"""``python -m cupyattn.benchmark linear`` and ``matmul``: what they call, count and print."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
from support.processes import run

import cupyattn
from cupyattn.benchmark import linear as command
from cupyattn.benchmark.cases import PRODUCTS, Harness
from cupyattn.benchmark.linear import (
    BATCHES,
    INTEGERS,
    LARGE,
    MATMUL,
    QUANTISED,
    LinearInputs,
    MatmulInputs,
    MatrixProduct,
    WeightProduct,
    matrix_products,
    products,
)
from cupyattn.emulator import Checks, Report
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.runtime.device.emulated import EmulatedDevice

HERE = Harness(np, cold=False)
FEW = WeightProduct("thin", 2, 16, 40, "float32", "nk", None)


def parsed(*words: str) -> argparse.Namespace:
    return command.BENCHMARK.parse(*words)[1]


def test_the_cases_are_those_of_the_command_line():
    usual = list(products(parsed()))
    assert [(c.M, c.N, c.K) for c in usual if c.kind == "large"] == list(LARGE)
    assert {c.activation for c in usual if c.kind == "thin"} == {None}
    words = ("--kind", "thin", "--dtype", "float32", "float16", "--layout", "kn", "nk")
    asked = list(products(parsed(*words, "--size", "1", "16", "32", "--activation", "silu")))
    assert len(asked) == 4
    assert {(c.M, c.N, c.K, c.activation) for c in asked} == {(1, 16, 32, "silu")}


def test_quantised_weights_stand_beside_those_of_the_dtype():
    cases = list(products(parsed("--kind", "large", "backward", "--weights", "nf4", "int8")))
    assert {case.kind for case in cases} == {"large", "dx"}
    assert {case.weights for case in cases} == {None, "nf4", "int8"}
    assert [(c.M, c.N, c.K) for c in cases if (c.kind, c.weights) == ("dx", "nf4")] == [*QUANTISED]
    quantised = products(parsed("--kind", "large", "--activations", "int8"))
    kinds = {(c.weights, c.activations, c.ceiling) for c in quantised}
    assert kinds == {(None, None, PRODUCTS), ("int8", "int8", None)}
    assert {case.weights for case in products(parsed("--layout", "kn", "--weights", "nf4"))} == {
        None
    }


@pytest.mark.parametrize("weights", [None, *FORMATS])
def test_calls_of_quantised_weights(weights):
    case = WeightProduct("large", 3, 8, 256, "float32", "nk", None, weights)
    inputs = LinearInputs(case, HERE)
    arrays = inputs.arrays
    w = arrays.weights[0]
    assert w.nbytes == case.weight_bytes
    dense = w if weights is None else cupyattn.dequantize(w)
    (call,) = inputs.own_calls()
    np.testing.assert_allclose(call(), arrays.x @ dense.T + arrays.b, rtol=1e-3, atol=1e-3)
    back = WeightProduct("dx", 3, 8, 256, "float32", "nk", None, weights)
    (call,) = LinearInputs(back, HERE).own_calls()
    np.testing.assert_allclose(call(), arrays.dout @ dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", [None, "nf4"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kind", ["large", "backward", "dx"])
def test_the_bytes_of_a_case_are_its_arrays(kind, activation, weights):
    case = WeightProduct(kind, 8, 64, 128, "float32", "nk", activation, weights)
    x, (w, *_), b, dout, out = LinearInputs(case, HERE).arrays
    expected = {
        "large": (x, w, b, out),
        "dx": (dout, w, out),
        "backward": (dout, *2 * (x, w, b), *[dout] * (activation is not None)),
    }[kind]
    assert case.bytes == sum(array.nbytes for array in expected)


def weights(product):
    return LinearInputs(product, Harness(np, filled=False)).arrays.weights


def test_few_rows_meet_weights_that_no_cache_holds():
    case = WeightProduct("thin", 1, 2560, 2560, "float16", "nk", None)
    assert len(weights(case)) * case.weight_bytes >= 2**28
    assert len(weights(WeightProduct("large", 1, 2560, 2560, "float16", "nk", None))) == 1
    assert len(weights(WeightProduct("thin", 1, 128256, 2048, "float16", "nk", None))) == 2


@pytest.fixture
def two_weights(monkeypatch):
    monkeypatch.setattr(Harness, "sets", lambda self, traffic, most: 2)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_forward_calls_are_linear_of_each_weight(layout, two_weights):
    case = WeightProduct("thin", 2, 16, 40, "float32", layout, "silu")
    inputs = LinearInputs(case, HERE)
    arrays = inputs.arrays
    calls = inputs.own_calls()
    assert len(calls) == 2
    for call, weight in zip(calls, arrays.weights, strict=True):
        assert call() is arrays.out
        w = weight.T if layout == "nk" else weight
        np.testing.assert_array_equal(
            arrays.out, cupyattn.linear(arrays.x, w, arrays.b, activation="silu")
        )


@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_backward_calls_write_what_is_there(activation):
    case = WeightProduct("backward", 8, 16, 24, "float32", "nk", activation)
    inputs = LinearInputs(case, HERE)
    arrays = inputs.arrays
    (call,) = inputs.own_calls()
    first, second = call(), call()
    assert all(a is b for a, b in zip(first, second, strict=True))
    w = arrays.weights[0].T
    expected = cupyattn.linear_backward(arrays.dout, arrays.x, w, arrays.b, activation=activation)
    np.testing.assert_allclose(first.dw, expected.dw, rtol=1e-3, atol=1e-4)


@pytest.mark.nvrtc
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_dw_alone_is_computed_without_dx(backend):
    (case,) = products(parsed("--kind", "dw", "--size", "8", "16", "24", "--dtype", "float32"))
    assert (case.kind, case.activation, case.flops) == ("dw", None, 2 * 8 * 16 * 24)
    inputs = LinearInputs(case, HERE)
    arrays = inputs.arrays
    with cupyattn.backend(backend):
        (call,) = inputs.own_calls()
        dx = call.args[-1].dx
        dx[...] = 7
        call.args[-1].dw[...] = 7
        np.testing.assert_allclose(call(), arrays.x.T @ arrays.dout, rtol=1e-3, atol=1e-4)
    assert (dx == 7).all() == (backend == "emulator")
    assert case.bytes == sum(array.nbytes for array in (arrays.x, arrays.dout, call()))


@pytest.mark.nvrtc
def test_the_reading_kernel_reads_all_once(two_weights):
    inputs = LinearInputs(WeightProduct("thin", 1, 40, 1000, "float32", "nk", None), HERE)
    arrays = inputs.arrays
    report = Report()
    device = EmulatedDevice(Checks.all(), report)
    for call in inputs.reading_calls(device):
        call()
    sectors = sum(access.sectors for access in report.accesses if access.space == "global")
    assert sectors * 32 == sum(weight.nbytes for weight in arrays.weights)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_cublas_computes_the_product_alone(layout):
    case = WeightProduct("large", 8, 16, 24, "float32", layout, "silu")
    inputs = LinearInputs(case, HERE)
    arrays = inputs.arrays
    (product,) = inputs.product_calls()
    w = arrays.weights[0].T if layout == "nk" else arrays.weights[0]
    np.testing.assert_allclose(product(), arrays.x @ w, rtol=1e-4, atol=1e-5)


def test_matmul_has_batches_of_floats_and_large_products_of_int8():
    usual = list(matrix_products(MATMUL.parse()[1]))
    sizes = {dtype: [(c.batch, c.M, c.N, c.K) for c in usual if c.dtype == dtype]
             for dtype in ("float16", "int8")}  # fmt: skip
    assert sizes == {"float16": [*BATCHES], "int8": [*INTEGERS]}
    asked = list(matrix_products(MATMUL.parse("--size", "2", "3", "4", "5", "--dtype", "int8")[1]))
    assert asked == [MatrixProduct(2, 3, 4, 5, "int8", "nk")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("batch", [1, 3])
def test_matmul_calls_are_one_product(batch, layout, dtype):
    case = MatrixProduct(batch, 5, 7, 16, dtype, layout)
    inputs = MatmulInputs(case, HERE)
    a, b, out = inputs.arrays
    assert case.bytes == a.nbytes + b.nbytes + out.nbytes
    assert case.flops == 2 * out.size * 16
    (own,) = inputs.own_calls()
    assert own() is out
    wide = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out.astype(np.float64), wide, rtol=1e-2, atol=2e-2)
    (library,) = inputs.library_calls()
    assert library().shape == out.shape


def test_int8_products_are_those_of_the_same_codes():
    """`rows given` and the call that quantises its rows give one result."""
    case = WeightProduct("large", 8, 16, 64, "float32", "nk", "silu", "int8", "int8")
    inputs = LinearInputs(case, HERE)
    (own,), (given,) = inputs.own_calls(), inputs.row_calls()
    first = own().copy()
    np.testing.assert_array_equal(first, given())
    w = inputs.arrays.weights[0]
    assert w.rotation == w.block_size == 64


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    file = tmp_path / "linear.json"
    words = ("--size", "64", "256", "512", "--calls", "3", "--json", str(file))
    result = run("linear", *words, launcher=("-m", "cupyattn.benchmark"))
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"large", "thin", "backward"}
    assert all(row["times"]["p50_s"] > 0 for row in rows)
