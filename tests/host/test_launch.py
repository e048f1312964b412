"""The arguments of a launch: their types, what does not fit, the grid."""

from __future__ import annotations

import numpy as np
import pytest
from support.recording_device import Recorder

from cupyattn.arrays import adopt
from cupyattn.kernels.launch import MAX_GRID_X, launch
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Struct
from cupyattn.ops.plan import ABSENT, Output, Plan, Step, lay_out_scratch, run

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
    Plan((), outputs, scratch, zero_first=("dw", "sums")).for_arrays(())
    with pytest.raises(TypeError, match=r"\['dx'\] are to be zero and neither results nor scratch"):
        Plan((), outputs, scratch, zero_first=("dw", "dx")).for_arrays(["dx"])


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


NUMBERS = (5, 0.1, 1, STRUCT)
FILL = KernelSpec("fill", "fill.cu", (Pointer("x"),)).specialise(threads=32)


def started_by(plan, **arrays):
    recorder = Recorder(make=np.empty)
    run(recorder, plan, adopt(arrays))
    return [arguments[: len(kernel.spec.pointers)] for kernel, _, arguments in recorder.started]


def test_kernels_get_arrays_by_name_and_null_for_what_is_absent():
    """Of one pointer or several; of arrays that are given, made, and placed in the workspace."""
    output, scratch = (("x", Output((3,), np.dtype(np.float32))),), lay_out_scratch({"sums": 5})
    steps = (Step.of(PROBE, 1, *NUMBERS), Step.of(FILL, 1))
    (x, maybe), (filled,) = started_by(Plan(steps, ()).for_arrays(["x"]), x=X)
    assert (x is X, maybe, filled is X) == (True, None, True)
    (x, maybe), _ = started_by(Plan(steps, ()).for_arrays(["x", "maybe"]), maybe=X[1:], x=X)
    assert x is X and np.shares_memory(maybe, X)
    steps = (Step.of(PROBE, 1, *NUMBERS, renamed={"maybe": "sums"}), Step.of(FILL, 1))
    (x, maybe), (filled,) = started_by(Plan(steps, output, scratch).for_arrays(()))
    assert (x.shape, maybe.shape) == ((3,), (5,)) and filled is x


def test_a_step_takes_the_arrays_of_other_names():
    step = Step.of(PROBE, 1, *NUMBERS).renamed({"x": "y", "maybe": "z"})
    ((y, z),) = started_by(Plan((step,), ()).for_arrays("yz"), x=X[2:], y=X, z=X[1:])
    assert y is X and z.size == 2
    ((y, z),) = started_by(Plan((step.renamed({"z": ABSENT}),), ()).for_arrays("yz"), y=X, z=X[1:])
    assert (y is X, z) == (True, None)
    with pytest.raises(TypeError, match=r"\['y'\] of probe are neither given nor made"):
        Plan((step,), ()).for_arrays("xz")


def test_a_plan_for_other_arrays_does_not_run():
    plan = Plan((Step.of(PROBE, 1, *NUMBERS),), ())
    with pytest.raises(KeyError, match="maybe"):
        started_by(plan, x=X)
