"""The arguments of a launch: their types, what does not fit, the grid."""

from __future__ import annotations

import numpy as np
import pytest
from support.recording_device import Recorder

from cupyattn.arrays import adopt
from cupyattn.kernels.launch import MAX_GRID_X, launch
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Struct
from cupyattn.ops.plan import Output, Plan, lay_out_scratch, run

PARAMS = np.dtype([("n", np.int64), ("x", np.float32)], align=True)
PROBE = KernelSpec(
    entry="probe",
    source="probe.cu",
    parameters=(
        Pointer("x", const=True),
        Pointer("maybe", optional=True),
        Scalar("count", np.dtype(np.int32)),
        Scalar("scale", np.dtype(np.float32)),
        Scalar("stride", np.dtype(np.int64)),
        Struct("params", PARAMS, "Params"),
    ),
).specialise(threads=32, N=1)
X, STRUCT = np.zeros(3), np.zeros((), PARAMS)[()]


def test_arguments_have_the_types_that_the_kernel_declares():
    recorder = Recorder()
    launch(recorder, PROBE, 7, (X, None, 5, 2, np.int8(-3), STRUCT))
    specialisation, grid, (x, maybe, count, scale, stride, params) = recorder.started[0]
    assert specialisation is PROBE
    assert grid == (7, 1, 1)
    assert x is X
    assert maybe is None, "a null pointer"
    assert (type(count), type(scale), type(stride)) == (np.int32, np.float32, np.int64)
    assert (count, scale, stride) == (5, 2.0, -3)
    assert params is STRUCT


def test_an_optional_pointer_may_be_an_array():
    recorder = Recorder()
    launch(recorder, PROBE, 1, (X, X, 5, 0.1, 2**40, STRUCT))
    _, _, (_, maybe, _, scale, stride, _) = recorder.started[0]
    assert maybe is X
    assert scale == np.float32(0.1)
    assert stride == 2**40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: None}, "x of probe must be an array, not None"),
        ({5: np.zeros((), np.int64)[()]}, "params of probe is another struct"),
        ({5: np.zeros((), [("n", np.int64)])[()]}, "params of probe is another struct"),
        ({5: 5}, "params of probe is another struct"),
        ({6: 1}, "probe takes 6 arguments, got 7"),
    ],
)
def test_arguments_that_do_not_fit_start_nothing(change, message):
    recorder = Recorder()
    arguments = dict(enumerate((X, None, 5, 0.1, 1, STRUCT))) | change
    with pytest.raises(TypeError, match=message):
        launch(recorder, PROBE, 1, tuple(arguments.values()))
    assert not recorder.started


def test_a_grid_of_nothing_starts_nothing():
    recorder = Recorder()
    launch(recorder, PROBE, 0, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.did_nothing


def test_the_largest_grid_and_one_more():
    recorder = Recorder()
    launch(recorder, PROBE, MAX_GRID_X, (X, None, 5, 0.1, 1, STRUCT))
    assert recorder.started[0][1] == (2**31 - 1, 1, 1)
    with pytest.raises(ValueError, match=r"2147483648 CTAs of probe; .*2147483647; split"):
        launch(recorder, PROBE, MAX_GRID_X + 1, (X, None, 5, 0.1, 1, STRUCT))
    assert len(recorder.started) == 1


def test_a_plan_zeroes_results_and_scratch_alone():
    outputs, scratch = (("dw", Output((3,), np.dtype(np.float32))),), lay_out_scratch({"sums": 5})
    Plan((), outputs, scratch, zero_first=("dw", "sums")).require_arrays(())
    with pytest.raises(TypeError, match=r"\['dx'\] are to be zero and neither results nor scratch"):
        Plan((), outputs, scratch, zero_first=("dw", "dx")).require_arrays(["dx"])


def test_a_run_zeroes_what_its_plan_says_once():
    """Of the memory of a call: a result that was given or made, and a piece of the workspace."""
    outputs = tuple((name, Output((3,), np.dtype(np.float32))) for name in ("dw", "db", "out"))
    plan = Plan((), outputs, lay_out_scratch({"before": 5, "sums": 7}), ("dw", "db", "sums"), True)
    dw, workspace = np.ones(3, np.float32), np.ones(128, np.float32)
    recorder = Recorder(make=lambda *output: np.ones(*output))
    results = run(recorder, plan, adopt({"dw": dw, "workspace": workspace}))
    assert results["dw"] is dw
    assert not any(results[name].any() for name in ("dw", "db", "out"))
    assert workspace.nonzero()[0].tolist() == [*range(64), *range(71, 128)]
    assert len(recorder.zeroed) == 4
