"""Bugs planted in the split of keys and in the sum of parts are found, by bounds or by checks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.forward_runs import ratios_of
from support.planted_bugs import Bug, planted_device
from support.split_keys import split
from support.strategies import AttentionProblem

import cupyattn
from cupyattn.emulator import KernelFault

pytestmark = pytest.mark.nvrtc

PARTS_CUH, WALK_CUH = "attention/key_parts.cuh", "attention/key_walk.cuh"
COMBINE_CU, SUM_CUH = "attention/combine_parts.cu", "attention/row_sum.cuh"
SPLIT_CU = "attention/tensor_core/forward_split.cu"
EPILOGUE_CUH = "attention/tensor_core/epilogue.cuh"
FLOAT_CUH, FLOAT_SPLIT_CU = (
    "attention/float32/epilogue.cuh",
    "attention/float32/forward_split.cu",
)
# Two tiles of queries, which see keys of different parts; parts that end within both, and none.
HALF = AttentionProblem(
    B=2, Sq=200, Sk=300, H=2, G=1, D=8, Dv=8, dtype="float16",
    drawn=(("causal", True), ("seqused_k", (300, 37)), ("q_offset", (100, 20)),
           ("sinks", "float32"), ("dropout_p", 0.5)),
)  # fmt: skip
CAUSAL = replace(HALF, B=1, Sq=140, drawn=(("causal", True), ("q_offset", 150)))
WINDOW = replace(CAUSAL, drawn=(("window_size", (70, 40)), ("sinks", "float32")))
FLOAT = replace(HALF, B=1, Sq=40, dtype="float32", drawn=(("sinks", "float32"), ("dropout_p", 0.5)))
PARTS = {HALF: 7, CAUSAL: 3, WINDOW: 3, FLOAT: 7}


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: AttentionProblem, *bugs: Bug) -> float:
        planted_device(monkeypatch, tmp_path / "cuda_src", *bugs)
        with split(PARTS[problem]):
            found = cupyattn.attention(*problem.arrays(), **problem.options(), return_lse=True)
        with np.errstate(invalid="ignore"):
            return max(ratios_of(problem, found, "flash").values())

    return run


@pytest.mark.parametrize("problem", PARTS, ids=["half", "causal", "window", "float"])
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    # A tile of keys belongs to two parts, or to none.
    (HALF, Bug(PARTS_CUH, "(part + 1) * each", "(part + 1) * each + 1")),
    (HALF, Bug(PARTS_CUH, "(part + 1) * each", "(part + 1) * each - 1")),
    (WINDOW, Bug(PARTS_CUH, "walk.begin + part * each", "part * each")),
    (WINDOW, Bug(PARTS_CUH, "div_up(keys, kTileK) + 1", "div_up(keys, kTileK) / 2")),
    # Masks are those of other tiles.
    (CAUSAL, Bug(WALK_CUH, "min(full_end, part.end)", "part.end")),
    (WINDOW, Bug(WALK_CUH, "max(full_begin, part.begin)", "part.begin")),
    # Parts are added up that are not there, not all of them, or with other weights.
    (HALF, Bug(COMBINE_CU, "parts(walk)", "parts(walk) + 1")),
    (HALF, Bug(COMBINE_CU, "parts - 1, 1,", "parts - 2, 1,")),
    (HALF, Bug(COMBINE_CU, "query / TILE_Q * TILE_Q", "0")),
    (HALF, Bug(SUM_CUH, "ex2_approx(parts[p].m - m)", "1.f")),
    (FLOAT, Bug(FLOAT_CUH, "kDropout ? params.scores.keep_scale : 1.f;", "kDropout ? 1.f : 1.f;")),
    (HALF, Bug(EPILOGUE_CUH, "kScale * params.scores.keep_scale : kScale", "kScale : kScale")),
    (HALF, Bug(PARTS_CUH, "sequence * attention.sq + query", "sequence + query")),
    (HALF, Bug(PARTS_CUH, "place.batch) * attention.heads", "place.batch)")),
    (HALF, Bug(SPLIT_CU, "blockIdx.x / params.splits", "blockIdx.x % params.splits")),
    (HALF, Bug(COMBINE_CU, "row / attention.sq % attention.heads", "row % attention.heads")),
    (HALF, Bug(COMBINE_CU, "sum.write<SINKS>", "sum.write<void>")),
    (HALF, Bug(EPILOGUE_CUH, "m[i][half] + kShiftLog2, l)", "m[i][half], l)")),
    (HALF, Bug(EPILOGUE_CUH, "* kUnshift * kScale;", "* kUnshift;")),
    (HALF, Bug(SUM_CUH, "row * kHeadDim, sums_g[row]", "row * kHeadDim, sums_g[0]")),
    (FLOAT, Bug(FLOAT_CUH, "make_float2(softmax.m[i], l)", "make_float2(softmax.m[0], l)")),
    (FLOAT, Bug(FLOAT_SPLIT_CU, "blockIdx.x % params.splits", "blockIdx.x / params.splits")),
]


@pytest.mark.parametrize(("problem", "bug"), WRONG)
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert not ratio_with(problem, bug) <= 1
