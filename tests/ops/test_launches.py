"""Arguments and grids that norms, sampling and softmax pass to their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.recording_device import device_array

import cupyattn
from cupyattn import (
    RMSNormGrads,
    explanation,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    softmax,
    softmax_backward,
)
from cupyattn.ops.sampling.kernels import PART

F16, F32 = np.float16, np.float32


def test_norm_forward_arguments(recorder):
    x = device_array((3, 4, 2048))
    residual = device_array((3, 8, 2048))[:, :4]
    weight = device_array((2048,))
    out, total, rstd = rms_norm(x, weight, residual=residual, weight_offset=1.0, return_stats=True)
    ((kernel, grid, arguments),) = recorder.started
    macros = dict(kernel.macros)
    assert kernel.spec.entry == "norm_forward"
    assert macros["CENTRED"] == macros["WITH_BIAS"] == macros["WITH_MEAN"] == "false"
    assert macros["WITH_RESIDUAL"] == macros["WITH_WEIGHT"] == macros["WITH_RSTD"] == "true"
    assert (macros["VEC"], macros["STRIPS"], macros["LANES"]) == (8, 2, 128)
    assert grid == (-(-12 // (kernel.threads // 128)), 1, 1)
    *arrays, eps, offset, params = arguments
    for passed, expected in zip(
        arrays, (x, residual, weight, None, out, total, None, rstd), strict=True
    ):
        assert passed is expected
    assert (rstd.shape, rstd.dtype) == ((3, 4), F32)
    assert (eps, offset) == (np.float32(1e-6), 1.0)
    assert params["strides"][1].tolist()[:2] == [8 * 2048, 2048]


@pytest.mark.parametrize(
    ("length", "items", "strips"), [(768, 24, 3), (1024, 32, 4), (1000, 32, 4), (260, 16, 2)]
)
def test_row_segments_follow_from_the_row_length(recorder, length, items, strips):
    layer_norm(device_array((5, length)))
    macros = dict(recorder.started[0].specialisation.macros)
    expected = strips if length % 8 == 0 else items
    assert macros["STRIPS"] == expected


def test_norm_backward_arguments(recorder):
    """A few CTAs per multiprocessor process the rows, and one launch adds both sums."""
    x, dout = device_array((10_000, 2048)), device_array((10_000, 2048))
    weight, stats = device_array((2048,)), device_array((10_000,), F32)
    grads = layer_norm_backward(dout, x, weight, stats, stats, bias=weight)
    (kernel, grid, arguments), (sums, sums_grid, sums_arguments) = recorder.started
    assert kernel.spec.entry == "norm_backward"
    assert grid == (recorder.multiprocessors, 1, 1)
    assert dict(kernel.macros)["WITH_MEAN"] == "true"
    assert arguments[7] is grads.dx
    assert sums.spec.entry == "column_sums"
    assert sums_grid == (2 * 2048 // 32, 1, 1)
    assert sums_arguments[2] is grads.dweight
    assert sums_arguments[3] is grads.dbias
    assert sums_arguments[4:] == (recorder.multiprocessors, 2048, 0)
    assert arguments[8].shape == arguments[9].shape == (recorder.multiprocessors * 2048,)


def test_column_sums_are_launched_only_for_a_weight(recorder):
    x, stats = device_array((7, 64)), device_array((7,), F32)
    rms_norm_backward(x, x, device_array((64,)), stats)
    rms_norm_backward(x, x, None, stats)
    entries = [started.specialisation.spec.entry for started in recorder.started]
    assert entries == ["norm_backward", "column_sums", "norm_backward"]
    assert recorder.started[1].arguments[1] is None
    assert recorder.started[1].arguments[3] is None
    assert recorder.started[1].grid == (2, 1, 1)


def test_norm_with_grads_and_workspace_allocates_nothing(recorder):
    x, stats, weight = device_array((7, 64)), device_array((7,), F32), device_array((64,))
    grads = RMSNormGrads(device_array((7, 64)), device_array((64,)))
    rms_norm_backward(x, x, weight, stats, grads=grads, workspace=device_array((4096,), np.uint8))
    assert recorder.allocated == []


ROWS = 3
MAXIMA, COUNTS, DRAW = "sample_maxima", "sample_bins", "sample"


def per_row(dtype: Any) -> Any:
    return device_array((ROWS,), dtype)


@pytest.mark.parametrize(
    ("options", "entries"),
    [
        ({"temperature": 0, "seed": None, "top_p": 0.5}, [DRAW]),
        ({}, [MAXIMA, DRAW]),
        ({"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0}, [MAXIMA, DRAW]),
        ({"min_p": 0.1}, [MAXIMA, DRAW]),
        ({"top_k": 5}, [MAXIMA, COUNTS, DRAW]),
        ({"top_p": 0.5, "min_p": 0.1}, [MAXIMA, COUNTS, DRAW]),
        ({"temperature": np.float32, "seed": np.uint64, "step": np.int32}, [MAXIMA, DRAW]),
        ({"top_k": np.int32, "temperature": np.float32}, [MAXIMA, COUNTS, DRAW]),
        ({"min_p": np.float32}, [MAXIMA, DRAW]),
    ],
)
@pytest.mark.parametrize("tokens", [100, 2 * PART + 1])
def test_sampling_launches_only_what_its_filters_need(recorder, options, entries, tokens):
    """Arrays of options are not read. With out= and workspace= nothing is allocated."""
    logits, ids = device_array((ROWS, tokens)), device_array((ROWS,), np.int32)
    room = device_array((2**20,), np.uint8)
    given = {n: per_row(v) if isinstance(v, type) else v for n, v in options.items()}
    found = cupyattn.sample(logits, **{"seed": 1, **given}, out=ids, workspace=room)
    assert found is ids
    assert recorder.allocated == []
    assert [each.specialisation.spec.entry for each in recorder.started] == entries
    parts = -(-tokens // PART)
    assert {each.grid for each in recorder.started} == {(ROWS * parts, 1, 1)}
    # Greedy, no launch is there to zero the counters of a row of several parts.
    assert len(recorder.zeroed) == (entries == [DRAW] and parts > 1)


def test_options_of_each_call_reach_the_kernel(recorder):
    """Plans are not cached by seed, step or the value of a filter."""
    logits = device_array((ROWS, 100))
    for seed, step, top_p in ((1, 0, 0.5), (2**64 - 1, 7, 0.5), (1, 2**40, 0.25)):
        cupyattn.sample(logits, seed=seed, step=step, top_p=top_p, top_k=9, min_p=0.125)
        draw = recorder.started[-1]
        passed = dict(
            zip([p.name for p in draw.specialisation.spec.parameters], draw.arguments, strict=True)
        )
        assert (passed["seed_value"], passed["step_value"], passed["top_k_value"]) == (
            seed,
            step,
            9,
        )
        assert (passed["top_p_value"], passed["min_p_value"]) == (top_p, 0.125)
        assert (passed["temperature_value"], passed["repetition_penalty_value"]) == (1, 1)
        assert type(passed["seed_value"]) is np.uint64
        assert all(passed[name] is None for name in ("seed", "step", "temperature", "top_k"))


@pytest.mark.parametrize(
    ("tokens", "stride", "rows", "aligned"),
    [(104, 104, 3, "true"), (104, 105, 3, "false"), (101, 101, 1, "true"), (101, 101, 3, "false")],
)
def test_vector_loads_where_each_row_starts_at_one(recorder, tokens, stride, rows, aligned):
    cupyattn.sample(device_array((rows, tokens), np.float16, (2 * stride, 2)), seed=0)
    assert dict(recorder.started[-1].specialisation.macros)["ALIGNED"] == aligned


@pytest.mark.parametrize("tokens", [4096, 128_256, 2**18])
def test_documented_workspace_suffices(recorder, tokens):
    """It is about 83,000 bytes per row, and 12 for each 4,096 tokens of a row."""
    rows = 64
    needed = rows * (83_000 + 12 * -(-tokens // 4096))
    cupyattn.sample(device_array((rows, tokens)), seed=0, top_p=0.5)
    (ids, workspace) = recorder.allocated
    assert ids.shape == (rows,)
    assert 0.97 * needed < workspace.nbytes <= needed


def test_softmax_arguments(recorder):
    """Neighbouring axes with even strides merge; the last axis is the row."""
    x = device_array((3, 4, 5, 24), np.float32)
    softmax(x)
    strided = device_array((3, 4, 10, 24), np.float32)[:, ::-1, ::2]
    softmax_backward(strided, x)
    (forward, grid, (_, _, _, result, *_, params)), (backward, _, arguments) = recorder.started
    assert result.shape == x.shape
    assert dict(forward.macros)["VEC"] == 4
    assert grid == (-(-3 * 4 * 5 // (forward.threads // dict(forward.macros)["LANES"])), 1, 1)
    assert (params["rows"], params["length"]) == (60, 24)
    assert params["shape"].tolist() == [60, 1, 1, 1]
    assert params["strides"].tolist() == [[24, 0, 0, 0], [0] * 4, [0] * 4, [24, 0, 0, 0]]
    assert backward.spec.entry == "softmax_backward"
    assert arguments[0] is strided
    assert arguments[-1]["shape"].tolist() == [3, 4, 5, 1]
    assert arguments[-1]["strides"].tolist() == [
        [960, -240, 48, 0],
        [480, 120, 24, 0],
        [480, 120, 24, 0],
        [0, 0, 0, 0],
    ]


TABLE = ((64, 32), "float32")
SQUARE, FLOATS = ((1024, 1024), "float16"), ((1024, 1024), "float32")
WEIGHT = cupyattn.quantize(np.ones((1024, 64), np.float32))


@pytest.mark.parametrize(
    ("function", "arrays", "options", "reasons"),
    [
        (cupyattn.linear, (SQUARE, SQUARE), {}, ["forward: float16 runs on tensor cores"]),
        (cupyattn.linear, (((4, 1024), "float16"), SQUARE), {}, ["forward: M = 4 is at most 64"]),
        (cupyattn.linear, (FLOATS, FLOATS), {}, ["forward: float32 runs in float32 arithmetic"]),
        (cupyattn.linear, (((9, 8192), "float16"), ((8192, 64), "float16")), {}, [
            "forward: M = 9 is at most 64", "columns are too few to fill the GPU: K is split",
        ]),
        (cupyattn.linear, (SQUARE, WEIGHT), {}, [
            "forward: float16 runs on tensor cores", "tiles do not fill the GPU evenly",
        ]),
        (cupyattn.linear, (((9, 1024), "float32"), WEIGHT), {}, ["forward: M = 9 is at most 16"]),
        (cupyattn.linear_backward, (SQUARE, SQUARE, SQUARE), {}, ["dx: float16", "dw: float16"]),
        (cupyattn.linear_backward, (((1024, 64), "float16"), SQUARE, WEIGHT), {}, ["dx: float16"]),
        (cupyattn.quantize, (SQUARE,), {"format": "nf4_nested"}, []),
        (cupyattn.dequantize, (WEIGHT,), {}, []),
        (cupyattn.quantize_rows, (SQUARE,), {}, []),
        (cupyattn.quantize_keys, (((1, 9, 2, 64), "float16"),), {}, []),
        (cupyattn.sample, (SQUARE,), {"seed": 0, "top_k": 5}, []),
        (cupyattn.rope, (((1, 64, 4, 64), "float16"), TABLE, TABLE), {}, []),
        (cupyattn.embedding, (SQUARE, ((7,), "int32")), {}, []),
        (cupyattn.embedding_backward, (((7, 1024), "float16"), SQUARE, ((7,), "int32")), {}, []),
    ],
)  # fmt: skip
def test_explain_gives_reasons(function, arrays, options, reasons, monkeypatch):
    """Every launch has one, and the choice of the kernels where there is one."""
    monkeypatch.setattr(explanation, "_report", lambda launch, arch: launch.specialisation)
    report = cupyattn.explain(function, *arrays, **options)
    assert all(kernel.reason for kernel in report.launches)
    assert len(report.reasons) == len(reasons)
    assert all(map(str.startswith, report.reasons, reasons))


def test_explain_reports_how_to_pass_a_shape():
    with pytest.raises(
        TypeError, match=r"argument 1 is \(4, 5\), a shape without a dtype"
    ) as passed:
        cupyattn.explain(cupyattn.linear, ((3, 4), "float16"), (4, 5))
    assert str(passed.value).endswith('pass for example ((4, 5), "float16")')
