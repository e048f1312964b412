"""Bugs planted in the kernels of cross-entropy and of the scores' options are found."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import planted_bugs
from support.planted_bugs import Bug

from cupyattn import reference
from cupyattn.arrays import adopt
from cupyattn.cli.recorder import Launch, LaunchRecorder
from cupyattn.emulator import KernelFault, OutOfBoundsError
from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.layers import cross_entropy, softmax
from cupyattn.kernels.configs.rows import RowKernel
from cupyattn.ops.layers.cross_entropy import reduce_losses
from cupyattn.ops.rows import row_problem, run_rows

pytestmark = pytest.mark.nvrtc

FORWARD_CU, BACKWARD_CU = "layers/cross_entropy_forward.cu", "layers/cross_entropy_backward.cu"
REDUCTION_CU, SCORES_CUH = "layers/loss_reduction.cu", "layers/row_scores.cuh"
ROWS_CUH, ONLINE_CUH = "common/rows.cuh", "layers/online_row.cuh"
LSE_BACKWARD_CU = "layers/logsumexp_backward.cu"

normal = partial(planted_bugs.normal, dtype="float32")
NUMBERS: dict[str, Any] = {"ignore_index": 2, "label_smoothing": 0.25, "z_loss": 0.125}
LABELS = np.array([7, 2, 0, 3], np.int32)


def recorded(
    kernel: RowKernel,
    arrays: dict[str, Any],
    choices: Mapping[str, Any],
    numbers: Mapping[str, Any],
    wanted: tuple[str, ...] = (),
) -> Launch:
    recorder = LaunchRecorder(TURING)
    operands = adopt(arrays)
    problem = row_problem(kernel, operands, wanted=wanted, choices=choices, scalars=numbers)
    run_rows(recorder, problem, operands)
    (launch,) = recorder.launches
    return launch


def named(launch: Launch) -> dict[str, Any]:
    """The arguments of a launch by the names of the kernel's parameters."""
    names = [parameter.name for parameter in launch.specialisation.spec.parameters]
    return dict(zip(names, launch.arguments, strict=True))


def loss_launch(vocabulary: int) -> Launch:
    arrays = {"logits": 3 * normal(4, vocabulary), "labels": LABELS}
    return recorded(cross_entropy.FORWARD, arrays, {"smoothed": True}, NUMBERS, ("lse",))


def loss_ratio(launch: Launch) -> float:
    given = named(launch)
    arguments = given["logits"], given["labels"]
    exact = reference.cross_entropy(*arguments, reduction="none", **NUMBERS)
    bounds = reference.cross_entropy_bound(*arguments, reduction="none", **NUMBERS)
    found = given["out"], given["lse"]
    return max(map(reference.error_ratio, found, exact, bounds))


def gradient_launch(vocabulary: int) -> Launch:
    logits = normal(4, vocabulary)
    lse = reference.logsumexp(logits).astype(np.float32)
    arrays = {"logits": logits, "labels": LABELS, "lse": lse, "dloss": normal(4), "dlse": normal(4)}
    return recorded(cross_entropy.BACKWARD, arrays, {}, NUMBERS)


def gradient_ratio(launch: Launch) -> float:
    given = named(launch)
    arguments = [given[name] for name in ("dloss", "logits", "labels", "lse")]
    options = {**NUMBERS, "reduction": "none", "dlse": given["dlse"]}
    exact = reference.cross_entropy_backward(*arguments, **options)
    bound = reference.cross_entropy_backward_bound(*arguments, dtype="float32", **options)
    return reference.error_ratio(given["dlogits"], exact, bound)


def score_launch(width: int) -> Launch:
    """Every option: a mask by rows and columns, a bias by columns with gaps between them."""
    mask = normal(4, width) < 0.5
    arrays = {"x": normal(4, width), "mask": mask, "bias": normal(2 * width)[::2]}
    choices = {"causal": True, "logarithm": False}
    return recorded(softmax.FORWARD, arrays, choices, {"scale": 0.75})


def score_ratio(launch: Launch) -> float:
    given = named(launch)
    options = {"mask": given["mask"], "bias": given["bias"], "causal": True, "scale": 0.75}
    exact = reference.softmax(given["x"], **options)
    bound = reference.softmax_bound(given["x"], dtype="float32", **options)
    return reference.error_ratio(given["out"], exact, bound)


KINDS = {
    "loss": (loss_launch, loss_ratio),
    "gradient": (gradient_launch, gradient_ratio),
    "scores": (score_launch, score_ratio),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 2100])
def test_a_clean_copy_is_right(kind, width, start_with):
    make, ratio = KINDS[kind]
    launch = make(width)
    start_with(launch)
    assert 0 < ratio(launch) <= 1


# kernel, columns, the bug
MISTAKES = {
    "the label of the neighbour": (
        "loss", 24, Bug(FORWARD_CU, "(row_g[label])", "(row_g[label ^ 1])"),
    ),
    "the label's share is whole": (
        "loss", 24, Bug(FORWARD_CU, "(1.f - label_smoothing) *", "1.f *"),
    ),
    "the sum is not of the whole row": (
        "loss", 24, Bug(FORWARD_CU, "sum = row_reduce<Sum, Rows>(sum, partial_s);", ";"),
    ),
    "columns beyond the row are summed": (
        "loss", 2100, Bug(FORWARD_CU, "sum[i] += inside ? x[strip][i] : 0.f;", "sum[i] += 4.f;"),
    ),
    "ignored rows count": ("loss", 24, Bug(FORWARD_CU, "loss = ignored ? 0.f :", "loss =")),
    "lse is not squared": ("loss", 24, Bug(FORWARD_CU, "z_loss * lse * lse", "z_loss * lse")),
    "a batch replaces what was before": (
        "loss", 20_000, Bug(ONLINE_CUH, "softmax.l += sum[i];", "softmax.l = sum[i];"),
    ),
    "half of the z loss's gradient": ("gradient", 24, Bug(BACKWARD_CU, "2.f * z_loss", "z_loss")),
    "the label's share is left out": ("gradient", 24, Bug(BACKWARD_CU, "? of_label :", "? 0.f :")),
    "the label of the neighbouring column": (
        "gradient", 24, Bug(BACKWARD_CU, "column + i == label", "column + (i ^ 1) == label"),
    ),
    "the label of a row is sought in the first batch alone": (
        "gradient", 24, Bug(BACKWARD_CU, "column <= label &&", "column < label &&"),
    ),
    "all columns get the whole smoothing": (
        "gradient", 24, Bug(BACKWARD_CU, "label_smoothing / params.length", "label_smoothing"),
    ),
    "dlse is left out": ("gradient", 24, Bug(BACKWARD_CU, "lse)) + dlse;", "lse));")),
    "one column more is seen": (
        "scores", 24, Bug(SCORES_CUH, "options.queries + 1;", "options.queries + 2;"),
    ),
    "causality counts from the first column": (
        "scores", 24, Bug(SCORES_CUH, "+ params.length - options.queries", ""),
    ),
    "the mask is turned round": ("scores", 24, Bug(SCORES_CUH, "mask[i] != 0.f", "mask[i] == 0.f")),
    "the bias of the neighbour": ("scores", 24, Bug(SCORES_CUH, "? bias[i] :", "? bias[i ^ 1] :")),
    "a bias without its stride": (
        "scores", 24, Bug(ROWS_CUH, "(column + i) * stride", "(column + i)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bound_or_faults(name, start_with):
    kind, width, bug = MISTAKES[name]
    make, ratio = KINDS[kind]
    launch = make(width)
    try:
        start_with(launch, bug)
    except KernelFault:
        return
    assert not ratio(launch) <= 10


def test_an_unchecked_label_is_found(start_with):
    """What protects from labels out of range: without it the logits before the first are read."""
    launch = loss_launch(24)
    named(launch)["labels"][0] = -5
    start_with(launch)
    assert np.isnan(named(launch)["out"][0])
    with pytest.raises(OutOfBoundsError):
        start_with(launch, Bug(FORWARD_CU, "0 <= label && ", ""))


REDUCTION_MISTAKES = {
    "ignored labels are counted": Bug(REDUCTION_CU, " != ignore_index;", " == ignore_index;"),
    "the last row is left out": Bug(REDUCTION_CU, "row < params.rows;", "row < params.rows - 1;"),
    "a thread takes every second row": Bug(REDUCTION_CU, "row += THREADS", "row += 2 * THREADS"),
}


def reduction_launch(rows: int) -> tuple[Launch, float]:
    """The mean of losses, as it is recorded; and what is right."""
    losses, labels = np.abs(normal(rows)), np.arange(rows, dtype=np.int64) % 5
    labels[-1] = 2
    recorder = LaunchRecorder(TURING)
    reduce_losses(recorder, adopt({"losses": losses, "labels": labels}), 0, True)
    (launch,) = recorder.launches
    return launch, float(losses.sum(dtype=np.float64) / np.count_nonzero(labels))


def test_the_reduction_is_right(start_with):
    launch, expected = reduction_launch(3001)
    start_with(launch)
    assert named(launch)["result"] == pytest.approx(expected, rel=3005 * 2.0**-24)


@pytest.mark.parametrize("name", REDUCTION_MISTAKES)
def test_a_mistake_in_the_reduction_is_found(name, start_with):
    launch, expected = reduction_launch(3001)
    start_with(launch, REDUCTION_MISTAKES[name])
    assert named(launch)["result"] != pytest.approx(expected, rel=1e-5)
