"""What a call of linear launches, and which memory it takes."""

from __future__ import annotations

import numpy as np
import pytest
from support.linear_problems import LinearCase
from support.recording_device import Recorder

from cupyattn.arrays import adopt
from cupyattn.ops.linear.backward import linear_backward
from cupyattn.ops.linear.checks import backward_problem, forward_problem
from cupyattn.ops.linear.forward import linear_forward


def made(recorder):
    """What was allocated: shapes and dtypes."""
    return [(array.shape, array.dtype.name) for array in recorder.allocated]


def forward(case, saved=False, **more):
    recorder = Recorder(np.empty)
    x, w, b = case.inputs()
    operands = adopt({"x": x, "w": w, "b": b, **more})
    problem = forward_problem(operands, case.activation, saved)
    return recorder, linear_forward(recorder, problem, operands)


def backward(case, saved=True, **more):
    recorder = Recorder(np.empty)
    x, w, b = case.inputs()
    dout = case.normal("dout", *case.M, case.N)
    z = case.normal("z", *case.M, case.width) if saved and case.activation else None
    arrays = {"dout": dout, "x": x, "w": w, "b": b, "preactivation": z, **more}
    operands = adopt(arrays)
    problem = backward_problem(operands, case.activation, case.accumulate)
    return recorder, linear_backward(recorder, problem, operands)


@pytest.mark.parametrize(("rows", "entry"), [(1, "thin"), (16, "thin"), (17, "forward")])
def test_one_launch_forward(rows, entry):
    case = LinearCase((rows,), 64, 64, activation="relu")
    recorder, results = forward(case, saved=True)
    assert recorder.entries == [f"linear_{entry}_f32"]
    assert list(results) == ["out", "preactivation"]
    assert made(recorder) == [((rows, 64), "float32")] * 2


def test_results_that_are_given_are_not_made():
    out = np.zeros((40, 64), np.float32)
    recorder, results = forward(LinearCase((40,), 64, 64), out=out)
    assert results["out"] is out
    assert not recorder.allocated


@pytest.mark.parametrize(("outer", "tile"), [(64, 64), (640, 128)])
def test_large_tiles_for_results_of_many(outer, tile):
    recorder, _ = forward(LinearCase((1024,), 8, outer))
    (launch,) = recorder.launches
    assert dict(launch.specialisation.macros)["TILE_M"] == tile
    assert launch.grid[0] == -(-1024 // tile) * -(-outer // 64)


def test_the_backward_of_a_saved_preactivation():
    recorder, results = backward(LinearCase((40,), 64, 64, activation="silu"))
    assert recorder.entries == ["linear_dx_f32", "linear_dw_f32", "linear_db_f32", "column_sums"]
    assert list(results) == ["dx", "dw", "db"]


def test_the_backward_of_none_computes_it_into_the_workspace():
    case = LinearCase((40,), 64, 64, activation="swiglu", biased=False)
    recorder, _ = backward(case, saved=False)
    assert recorder.entries == ["linear_forward_f32", "linear_dx_f32", "linear_dw_f32"]
    first, dx, _ = recorder.launches
    assert first.arguments[4].nbytes == 40 * 128 * 4
    assert np.shares_memory(first.arguments[4], dx.arguments[2])
    assert first.arguments[2:4] == (None, None)
    assert first.arguments[5] is None


def test_a_workspace_makes_allocations_unnecessary():
    case = LinearCase((40,), 64, 64, "bfloat16", "gelu")
    x, w, b = case.inputs()
    grads = {"dx": np.zeros_like(x), "dw": np.zeros_like(w), "db": np.zeros_like(b)}
    with pytest.raises(
        ValueError, match=r"workspace has 100 bytes; this call needs (\d+)"
    ) as small:
        backward(case, saved=False, workspace=np.zeros(100, np.uint8), **grads)
    needed = int(str(small.value).split("needs ")[1].split(",")[0])
    assert needed >= 40 * 64 * 2
    recorder, _ = backward(case, saved=False, workspace=np.zeros(needed, np.uint8), **grads)
    assert not recorder.allocated


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_dw_is_made_in_the_memory_that_w_would_have(dtype, accumulate):
    """Where w is the transpose of an array (N, K), dw is; an array that is given stays."""
    case = LinearCase((40,), 64, 32, dtype, turned=True, accumulate=accumulate)
    recorder, results = backward(case)
    assert made(recorder)[:3] == [((40, 64), dtype), ((32, 64), dtype), ((32,), dtype)]
    assert results["dw"].shape == (64, 32)
    assert results["dw"].T.flags.c_contiguous
    dw = np.zeros((64, 32), results["dw"].dtype)
    _, results = backward(case, dw=dw)
    assert results["dw"] is dw


def test_what_is_added_to_begins_at_zero_where_it_is_new():
    case = LinearCase((5,), 8, 8, accumulate=True)
    dw = np.ones((8, 8), np.float32)
    _, results = backward(case, dw=dw)
    assert results["dw"] is dw
    assert (dw == 1).all()
    assert not results["dx"].any()


def test_a_call_of_one_description_is_planned_once():
    first, second = (forward(LinearCase((40,), 64, 64))[0] for _ in range(2))
    assert first.launches[0].specialisation is second.launches[0].specialisation
    assert first.launches[0].arguments[-1] is second.launches[0].arguments[-1]
