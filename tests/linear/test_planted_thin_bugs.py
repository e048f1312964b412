"""Bugs planted in the kernels for few rows are found: by the emulator's checks, or the bounds."""

from __future__ import annotations

import numpy as np
import pytest
from linear.test_thin import Case, case
from support.planted_bugs import Bug, found_by, without_barrier

from cupyattn import reference
from cupyattn.arrays import adopt
from cupyattn.cli.recorder import Launch, LaunchRecorder
from cupyattn.emulator import OutOfBoundsError, SharedMemoryRaceError
from cupyattn.kernels.arch import TURING
from cupyattn.ops.linear.checks import forward_problem
from cupyattn.ops.linear.forward import linear_forward

pytestmark = pytest.mark.nvrtc

PRODUCT, ROW, MERGE = (f"linear/thin/{name}.cu" for name in ("product", "row", "merge"))
TILE, WEIGHTS = (f"linear/thin/{name}.cuh" for name in ("tile", "weights"))

# A call's rows, whether w lies along K, its activation, K and N. Rows have gaps between them.
CALLS = {
    "along K": (7, True, "swiglu", 328, 69),
    "along N": (7, False, "swiglu", 328, 72),
    "64 rows": (64, True, None, 328, 72),
    "side by side": (17, True, None, 40, 4100),
    "one row along K": (1, True, "gelu", 328, 71),
    "one row along N": (1, False, "swiglu", 328, 72),
    "split": (3, True, "gelu", 10_248, 24),
}


class Recorded:
    """The launches of a call, which write arrays that held NaN."""

    def __init__(self, name: str) -> None:
        rows, along_k, activation, inner, outer = CALLS[name]
        self.call: Case = case(
            rows, inner, outer, along_k=along_k, activation=activation, padding=8
        )
        named = dict(zip(("x", "w", "b", "residual"), self.call, strict=False))
        columns = outer if activation in (None, "gelu") else 2 * outer
        self.results = [np.full((rows, outer + 8), np.nan, np.float16)[:, :outer]]
        named["out"] = self.results[0]
        if activation:
            self.results.append(np.full((rows, columns + 8), np.nan, np.float16)[:, :columns])
            named["preactivation"] = self.results[1]
        operands = adopt(named)
        recorder = LaunchRecorder(TURING)
        problem = forward_problem(operands, activation, activation is not None)
        linear_forward(recorder, problem, operands)
        self.launches: list[Launch] = recorder.launches

    def error_ratio(self) -> float:
        """The largest error of out and preactivation, over its bound."""
        arrays, activation = self.call[:4], self.call.activation
        exact = reference.linear(*arrays, activation=activation)
        bounds = reference.linear_bound(*arrays, activation=activation, dtype="float16")
        each = zip(self.results, exact, bounds, strict=False)
        return max(reference.error_ratio(*result) for result in each)


@pytest.mark.parametrize("name", CALLS)
def test_a_clean_copy_of_a_kernel_is_right(name, start_with):
    recorded = Recorded(name)
    assert len(recorded.launches) == (2 if name == "split" else 1)
    for launch in recorded.launches:
        start_with(launch)
    assert 0 < recorded.error_ratio() <= 1


# The call, the bug, what finds it.
FAULTS = {
    "sums are read while others are written": (
        "along K",
        without_barrier(PRODUCT, "smem.sums and smem.bias: written by every warp"),
        SharedMemoryRaceError,
    ),
    "sums are written while others are read": (
        "64 rows",
        Bug(PRODUCT, "if (tile > 0) __syncthreads();", ""),
        SharedMemoryRaceError,
    ),
    "sums of one row are read while others are written": (
        "one row along K",
        without_barrier(ROW, "smem.sums: written by every warp"),
        SharedMemoryRaceError,
    ),
    "along K: k beyond K are read": (
        "along K",
        Bug(WEIGHTS, "line_g[i] + k + skip, count - skip", "line_g[i] + k + skip, count"),
        OutOfBoundsError,
    ),
    "along N: k beyond K are read": (
        "along N",
        Bug(WEIGHTS, "step * kStepItems + i < rows ? count : 0", "count"),
        OutOfBoundsError,
    ),
    "along K: columns beyond N are read": (
        "along K",
        Bug(WEIGHTS, "min(Tile::result(first, column), params.outer - 1)",
            "Tile::result(first, column)"),
        OutOfBoundsError,
    ),
    "rows beyond M are read": (
        "along K",
        Bug(WEIGHTS, "8 * i < rows ? count - skip : 0", "count - skip"),
        OutOfBoundsError,
    ),
    "a row too many is stored": (
        "along K",
        Bug(PRODUCT, "first_row + row >= params.rows", "first_row + row > params.rows"),
        OutOfBoundsError,
    ),
    "a column too many is stored": (
        "along N",
        Bug(PRODUCT, "if (result >= params.outer)", "if (result > params.outer)"),
        OutOfBoundsError,
    ),
    "one row: a column too many is stored": (
        "one row along K",
        Bug(ROW, "result < params.outer;", "result <= params.outer;"),
        OutOfBoundsError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, start_with):
    call, bug, fault = FAULTS[name]
    (launch,) = Recorded(call).launches
    with found_by(fault):
        start_with(launch, bug)


# The call, and a bug that leaves its result outside of the bounds.
MISTAKES = {
    "along K: both halves of a fragment are its first columns": (
        "along K", Bug(WEIGHTS, "pairs[step][2 * i + 1][quarter]", "pairs[step][2 * i][quarter]"),
    ),
    "along N: neighbouring columns are swapped": (
        "along N", Bug(WEIGHTS, "(even, odd, 0x7632)", "(even, odd, 0x5410)"),
    ),
    "along N: columns are found where they lie along K": (
        "along N", Bug(WEIGHTS, "return column % kItems * 8 + column / kItems;", "return column;"),
    ),
    "what a gate acts on is the gate": (
        "along K", Bug(TILE, "column >= kResults ? outer : 0", "column > kResults ? outer : 0"),
    ),
    "the last burst is left out": (
        "along N",
        Bug(TILE, "(params.inner + kBurstItems - 1) /", "params.inner /"),
    ),
    "the last warp's sum is left out": (
        "split",
        Bug(PRODUCT, "warp < Traits::kKWarps; warp++", "warp < Traits::kKWarps - 1; warp++"),
    ),
    "the bias is that of the first group": (
        "side by side",
        Bug(PRODUCT, "smem.bias[group * Tile::kColumns + column]", "smem.bias[column]"),
    ),
    "the next rows are multiplied with x of these": (
        "64 rows",
        Bug(WEIGHTS, "pairs[step % kSlots][i][quarter]", "pairs[step % kSlots][i / 2][quarter]"),
    ),
    "the preactivation is what goes through the gate": (
        "along K",
        Bug(TILE, "+ column] = from_float<Item>(up)", "+ column] = from_float<Item>(z)"),
    ),
    "one row along N: the wrong half of the columns is sent": (
        "one row along N", Bug(ROW, "sent = upper ? sum[i] : sum[count + i]", "sent = sum[i]"),
    ),
    "one row along K: a warp's second column is the first": (
        "one row along K",
        Bug(ROW, "(sum[i], pairs[step][i], x)", "(sum[i], pairs[step][0], x)"),
    ),
    "one row: the bias of what the gate acts on is left out": (
        "one row along N",
        Bug(ROW, "Tile::kResults, bias_of(up_bias))", "Tile::kResults, 0.f)"),
    ),
    "the last part of K is left out": (
        "split", Bug(MERGE, "split < splits; split++", "split < splits - 1; split++"),
    ),
    "parts of K overlap": (
        "split", Bug(TILE, "(split + 1) / params.splits", "(split + 2) / params.splits"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_of_the_bounds(name, start_with):
    call, bug = MISTAKES[name]
    recorded = Recorded(call)
    for launch in recorded.launches:
        start_with(launch, bug)
    assert not recorded.error_ratio() <= 10
