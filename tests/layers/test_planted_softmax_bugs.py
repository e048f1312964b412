"""Bugs planted in the softmax kernels are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.planted_bugs import (
    REDUCE_CUH,
    Bug,
    found_by,
    normal,
    without_barrier,
)

import cupyattn
from cupyattn import reference
from cupyattn.cli.recorder import Launch, LaunchRecorder
from cupyattn.emulator import (
    MisalignedAccessError,
    OutOfBoundsError,
    SharedMemoryRaceError,
)
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.layers import softmax
from cupyattn.kernels.configs.rows import RowKernel
from cupyattn.ops.rows import row_problem, run_rows

pytestmark = pytest.mark.nvrtc


PLAIN = {"causal": False, "logarithm": False}
SCALE = 0.75


def launch_of(
    kernel: RowKernel, arrays: dict[str, Any], choices: Mapping[str, Any] = PLAIN
) -> Launch:
    recorder = LaunchRecorder(TURING)
    operands = cupyattn.arrays.adopt(arrays)
    problem = row_problem(kernel, operands, choices=choices, scalars={"scale": SCALE})
    run_rows(recorder, problem, operands)
    (recorded,) = recorder.launches
    named(recorded)[next(iter(kernel.results))].fill(np.nan)
    return recorded


def named(recorded: Launch) -> dict[str, Any]:
    """The arguments of a launch by the names of the kernel's parameters."""
    names = [parameter.name for parameter in recorded.specialisation.spec.parameters]
    return dict(zip(names, recorded.arguments, strict=True))


def softmax_launch(length: int, *, backward: bool = False) -> Launch:
    """Three rows. Those of the backward's two inputs lie differently far apart."""
    x, dout = normal(2, 3, length)
    if not backward:
        return launch_of(softmax.FORWARD, {"x": x})
    out = np.zeros((3, length + 8), x.dtype)[:, :length]
    out[...] = reference.softmax(x)
    return launch_of(softmax.BACKWARD, {"dout": dout, "out": out})


def softmax_error_ratio(recorded: Launch) -> float:
    """The largest error of what a softmax launch has written, over its bound."""
    given = named(recorded)
    if "dx" in given:
        dout, out, dx = given["dout"], given["out"], given["dx"]
        exact = reference.softmax_backward(dout, out, scale=SCALE)
        bound = reference.softmax_backward_bound(dout, out, dtype=dx.dtype, scale=SCALE)
        return reference.error_ratio(dx, exact, bound)
    x, out = given["x"], given["out"]
    exact = reference.softmax(x, scale=SCALE)
    bound = reference.softmax_bound(x, dtype=out.dtype, scale=SCALE)
    return reference.error_ratio(out, exact, bound)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("length", [24, 2040, 2048, 20_000])
def test_a_clean_copy_of_a_softmax_kernel_is_right(length, backward, start_with):
    recorded = softmax_launch(length, backward=backward)
    start_with(recorded)
    assert 0 < softmax_error_ratio(recorded) <= 1


SOFTMAX_CU, SOFTMAX_BACKWARD_CU = "layers/softmax_forward.cu", "layers/softmax_backward.cu"
ROWS_CUH, SCORES_CUH = "common/rows.cuh", "layers/row_scores.cuh"
SOFTMAX_CUH = "common/online_softmax.cuh"


@pytest.mark.parametrize(
    ("backward", "comment"),
    [
        (False, "partial_s: the previous"),  # the backward reduces but once: none was before it
        (False, "partial_s: written"),
        (True, "partial_s: written"),
    ],
)
def test_a_barrier_dropped_in_a_softmax_kernel_is_found(backward, comment, start_with):
    recorded = softmax_launch(2048, backward=backward)
    with pytest.raises(SharedMemoryRaceError, match=r"\(in `.*partial_s`, 16 bytes at 0\)"):
        start_with(recorded, without_barrier(REDUCE_CUH, comment))


# length of a row, the bug, what finds it
SOFTMAX_FAULTS = {
    "one vector too many is loaded": (
        2040, Bug(ROWS_CUH, "(column < length) {\n    load", "(column <= length) {\n    load"),
        OutOfBoundsError,
    ),
    "one vector too many is stored": (
        2040, Bug(ROWS_CUH, "(column < length) store", "(column <= length) store"),
        OutOfBoundsError,
    ),
    "the last strip has no end": (
        2040, Bug(ROWS_CUH, "(column < length) {\n    load", "(true) {\n    load"),
        OutOfBoundsError,
    ),
    "vectors begin one item late": (
        2048,
        Bug(ROWS_CUH, "load_vec(values, row_g + column)", "load_vec(values, row_g + column + 1)"),
        MisalignedAccessError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", SOFTMAX_FAULTS)
def test_a_bug_in_a_softmax_kernel_is_found(name, backward, start_with):
    length, bug, fault = SOFTMAX_FAULTS[name]
    with found_by(fault):
        start_with(softmax_launch(length, backward=backward), bug)


def test_strides_of_another_array_are_found(start_with):
    """They lead into what lies between the rows of out, a slice."""
    bug = Bug(SOFTMAX_BACKWARD_CU, "row_offset(params, kY,", "row_offset(params, kDout,")
    with pytest.raises(OutOfBoundsError, match="between the elements of the strided view"):
        start_with(softmax_launch(2040, backward=True), bug)


# A mistake, and the length of a row at which it shows.
RAGGED = Bug(ROWS_CUH, "(length + kBatchItems - 1) / kBatchItems", "length / kBatchItems")
OTHERS = Bug(ROWS_CUH, "threadIdx.x % Rows::kLanes * Rows::kVec", "threadIdx.x * Rows::kVec")
LOAD_AGAIN = "if (!Rows::kResident) load_batch(s, row, batch);"
LOAD_BOTH_AGAIN = "if (!Rows::kResident) batch_r.load(dout_row_g, y_row_g, batch, length);"
FORWARD_MISTAKES = {
    "the ragged batch is left out": (RAGGED, 20_000),
    "threads forget that other rows have their CTA too": (OTHERS, 24),
    "the last row is left out": (
        Bug(SOFTMAX_CU, "index < params.rows;", "index < params.rows - 1;"), 24,
    ),
    "columns beyond the row count": (Bug(SCORES_CUH, ": -kInfinity;", ": 4.f;"), 2040),
    "the scale is left out": (Bug(SCORES_CUH, "fmaf(options_.scale, ", "fmaf(1.f, "), 24),
    "weights of a thread stay under its own maximum": (
        Bug(SOFTMAX_CU, "(kKeepsWeights ? factor : 1.f)", "1.f"), 2040,
    ),
    "sums stay under each thread's maximum": (
        Bug(SOFTMAX_CUH, "  l *= shrink;", "  l *= 1.f;"), 2040,
    ),
    "the second read is of the first batch": (
        Bug(SOFTMAX_CU, LOAD_AGAIN, LOAD_AGAIN.replace("batch);", "0);")), 20_000,
    ),
}  # fmt: skip
BACKWARD_MISTAKES = {
    "the ragged batch is left out": (RAGGED, 20_000),
    "threads forget that other rows have their CTA too": (OTHERS, 24),
    "the last row is left out": (
        Bug(SOFTMAX_BACKWARD_CU, "row < params.rows;", "row < params.rows - 1;"), 24,
    ),
    "y of the neighbouring column": (
        Bug(SOFTMAX_BACKWARD_CU, "(dout[strip][i], y[strip][i], row_sum)",
            "(dout[strip][i], y[strip][i ^ 1], row_sum)"), 2048,
    ),
    "the dot product of the neighbouring columns": (
        Bug(SOFTMAX_BACKWARD_CU, "y[strip][i] * dout[strip][i];",
            "y[strip][i] * dout[strip][i ^ 1];"), 2048,
    ),
    "the scale is left out": (Bug(SOFTMAX_BACKWARD_CU, "dx[i] = scale *", "dx[i] ="), 24),
    "the second read is of the first batch": (
        Bug(SOFTMAX_BACKWARD_CU, LOAD_BOTH_AGAIN, LOAD_BOTH_AGAIN.replace("batch,", "0,")), 20_000,
    ),
}  # fmt: skip
SOFTMAX_MISTAKES = {f"forward: {name}": mistake for name, mistake in FORWARD_MISTAKES.items()}
SOFTMAX_MISTAKES |= {f"backward: {name}": mistake for name, mistake in BACKWARD_MISTAKES.items()}


@pytest.mark.parametrize("name", SOFTMAX_MISTAKES)
def test_a_mistake_in_a_softmax_kernel_is_outside_its_bound(name, start_with):
    bug, length = SOFTMAX_MISTAKES[name]
    recorded = softmax_launch(length, backward=name.startswith("backward"))
    start_with(recorded, bug)
    assert not softmax_error_ratio(recorded) <= 10
