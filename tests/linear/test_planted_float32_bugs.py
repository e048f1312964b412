"""Bugs planted in the float32 kernels of linear are found: by checks, or by the bounds."""

from __future__ import annotations

from typing import Any

import pytest
from support.linear_problems import LinearCase
from support.planted_bugs import Bug, without_barrier

from cupyattn.emulator import KernelFault, OutOfBoundsError, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

OPERANDS, PRODUCT = "linear/float32/operands.cuh", "linear/float32/product.cuh"
THIN, DB = (f"linear/float32/{name}.cu" for name in ("thin", "db"))
FORWARD = "linear/float32/forward_tile.cuh"


TILES = LinearCase((70,), 24, 72, activation="gelu_tanh", residual=True)
TURNED = LinearCase((70,), 24, 72, activation="gelu_tanh", turned=True)
GATED = LinearCase((66,), 24, 40, activation="swiglu")
FEW = LinearCase((3,), 264, 40, activation="gelu_tanh", residual=True)
ADDED = LinearCase((70,), 24, 72, activation="gelu_tanh", accumulate=True)
LONG = LinearCase((650,), 8, 8)


@pytest.mark.parametrize("case", [TILES, GATED, FEW, LONG], ids=["tiles", "gated", "few", "long"])
def test_a_clean_copy_is_right(case, ratio_with):
    assert 0 < ratio_with(case, False) <= 1


@pytest.mark.parametrize(
    ("case", "file", "comment"),
    [
        (TILES, PRODUCT, "the first buffer is filled"),
        (TILES, PRODUCT, "the other buffer is filled, and this one read"),
        (FEW, THIN, "all sums are there"),
    ],
)
def test_a_barrier_dropped_is_found(case, file, comment, ratio_with):
    with pytest.raises((SharedMemoryRaceError, KernelFault)):
        ratio_with(case, False, without_barrier(file, comment))


# the problem, whether it is the backward's, the bug
FAULTS: dict[str, tuple[LinearCase, bool, Bug]] = {
    "a row too many is loaded": (
        TILES, False, Bug(OPERANDS, "left(line) > 0 ? depth", "left(line) >= 0 ? depth"),
    ),
    "depths that do not exist are loaded": (
        TILES, False, Bug(OPERANDS, "at < depth ? lines", "at <= depth ? lines"),
    ),
    "a row too many is stored": (
        TILES, False, Bug(FORWARD, "if (row >= params.rows)", "if (row > params.rows)"),
    ),
    "a row too many of the gradient is stored": (
        TILES, True, Bug(PRODUCT, "if (row >= params.rows)", "if (row > params.rows)"),
    ),
    "the last part has as many rows as the others": (
        LinearCase((70,), 8, 8), True,
        Bug(DB, "min(first + params.depth, params.rows)", "first + params.depth"),
    ),
    "few rows: a column too many": (
        FEW, False, Bug(THIN, "columns.left(local) <= 0)", "columns.left(local) < 0)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_bug_is_found_by_a_check(name, ratio_with):
    case, backward, bug = FAULTS[name]
    with pytest.raises(OutOfBoundsError):
        ratio_with(case, backward, bug)


MISTAKES: dict[str, tuple[LinearCase, bool, Bug]] = {
    "rows of the other half": (
        TILES, False, Bug(PRODUCT, "x_s ^ (kRowLanes", "x_s + 0 * (kRowLanes"),
    ),
    "the last step is left out": (
        TILES, False, Bug(PRODUCT, "(a.depth + kDepth - 1) / kDepth", "(a.depth - 1) / kDepth"),
    ),
    "the bias of the first columns for all": (
        TILES, False, Bug(FORWARD, "bias, b + column,", "bias, b + column % 4,"),
    ),
    "no activation": (TILES, False, Bug(FORWARD, "= Act::value(groups[g][k]);", "= groups[g][k];")),
    "gate and up are taken for each other": (
        GATED, False,
        Bug(FORWARD, "(groups[0][k]) * groups[1][k]", "(groups[1][k]) * groups[0][k]"),
    ),
    "the gradient of up is that of the gate": (
        GATED, True, Bug(OPERANDS, "upper ? Activation::value", "upper ? Activation::derivative"),
    ),
    "gradients replace what they are added to": (
        ADDED, True, Bug(PRODUCT, "if (params.accumulate) load", "if (false) load"),
    ),
    "dz is dout": (TURNED, True, Bug(OPERANDS, "dout * Activation::derivative(", "dout * (1.f, ")),
    "tiles beyond eight rows of them": (
        LONG, False, Bug(PRODUCT, "row = group * kGroupRows + within", "row = within"),
    ),
    "few rows: the sums of one warp are forgotten": (
        FEW, False, Bug(THIN, "part < kParts", "part < kParts - 1"),
    ),
    "few rows: the bias of a neighbour": (
        FEW, False, Bug(THIN, "to_float(b[columns.place(local)])", "to_float(b[columns.place(0)])"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bound(name, ratio_with):
    case, backward, bug = MISTAKES[name]
    assert not ratio_with(case, backward, bug) <= 10


def test_what_is_planted_is_run(ratio_with: Any):
    """A bug that does not compile would pass for one that is found."""
    assert ratio_with(FEW, False, Bug(THIN, "float y = Act", "float y = 1.f * Act")) <= 1
