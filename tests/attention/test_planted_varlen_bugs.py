"""Bugs planted in how the kernels of packed sequences find their rows are found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import block_masks
from support.block_masks import masked_tiles
from support.devices import NUMPY
from support.packed_modifiers import PackedBlocks, PackedExpressions, ragged
from support.planted_bugs import Bug, planted_device
from support.strategies import AttentionProblem
from support.varlen import VarlenProblem

import cupyattn
from cupyattn.emulator import Checks, KernelFault
from cupyattn.kernels.device.emulated import EmulatedDevice

pytestmark = pytest.mark.nvrtc

ROWS_CUH, PARAMS_CUH = "attention/packed_rows.cuh", "attention/varlen_params.cuh"
FORWARD_CU = "attention/tensor_core/forward_varlen.cu"
FLOAT_CU = "attention/float32/forward_varlen.cu"
# Two sequences of as many tiles, one without queries, one without keys, and keys not in use.
HALF = VarlenProblem(
    AttentionProblem(
        B=5, Sq=300, Sk=150, H=2, G=1, D=8, Dv=8, dtype="float16",
        drawn=(("causal", True), ("seqused_k", (150, 9, 60, 30, 0))),
    ),
    queries=(5, 300, 0, 33, 260), keys=(150, 90, 70, 60, 0), spare=2,
)  # fmt: skip
WHOLE = replace(HALF, dense=replace(HALF.dense, drawn=(("causal", True),)))
FLOAT = replace(HALF, dense=replace(HALF.dense, dtype="float32", D=24, Dv=40))
EQUAL = replace(WHOLE, queries=(40,) * 5, keys=(60,) * 5)
MANY = VarlenProblem(
    replace(HALF.dense, B=40, Sq=130, Sk=20, drawn=()),
    queries=(3,) * 36 + (0, 130, 3, 130), keys=(20,) * 40,
)  # fmt: skip


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: VarlenProblem, *bugs: Bug) -> float:
        planted_device(monkeypatch, tmp_path / "cuda_src", *bugs, modules=["varlen"])
        out, lse = cupyattn.attention_varlen(
            *problem.arrays(), *problem.longest, return_lse=True, **problem.given()
        )
        return problem.ratio(out, lse)

    return run


@pytest.mark.parametrize("problem", [HALF, FLOAT, MANY], ids=["half", "float", "many"])
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    (MANY, Bug(ROWS_CUH, "longer & set : longer | set", "longer & set : longer")),
    (EQUAL, Bug(ROWS_CUH, "alike.all = alike.tiles * batch;", "alike.all = alike.tiles;")),
    (HALF, Bug(ROWS_CUH, "turn.tile, alike.tiles}", "0, alike.tiles}")),
    (FLOAT, Bug(FLOAT_CU, "k_g + begin * attention.k.seq", "k_g")),
    (HALF, Bug(PARAMS_CUH, "- queries.count :", "- longest.sq :")),
    (HALF, Bug(FORWARD_CU, "rows_from(k_g, attention.k, sequence.keys)", "k_g")),
    (HALF, Bug(PARAMS_CUH, "__syncthreads();  // work: written", "")),
    (MANY, Bug(ROWS_CUH, "up_to_lane) == nth + 1", "up_to_lane) == 1")),
    (HALF, Bug(PARAMS_CUH, "(tile.tiles - 1 - tile.tile)", "tile.tile + 1")),
    (HALF, Bug(ROWS_CUH, "return {begin, min(end - begin, longest)};", "return {begin, longest};")),
    (HALF, Bug(ROWS_CUH, "before = longer;", "")),
    (HALF, Bug(PARAMS_CUH, "__syncthreads();  // work: read", "//")),
    (HALF, Bug(ROWS_CUH, "length += lane * step;", "length += step;")),
    (WHOLE, Bug(PARAMS_CUH, "seqused_k_g, batch), keys.count)", "seqused_k_g, batch), 1 << 20)")),
    (HALF, Bug(PARAMS_CUH, "rows.begin};", "0};")),
    (HALF, Bug(PARAMS_CUH, "tile.head / longest.group", "0 * tile.head + 1")),
    (MANY, Bug(ROWS_CUH, "first == 0 ? own : lane_tiles(first, tile_rows)", "own")),
    (MANY, Bug(ROWS_CUH, "nth -= __popc(alike);", "")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "bug"), WRONG)
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert not ratio_with(problem, bug) <= 1  # NaN too


EXPRESSIONS = PackedExpressions(
    ragged("float16", 24, Sq=150, Sk=200), (150, 40, 7), (200, 30, 90), put=np.asarray
)
BLOCKS = PackedBlocks(  # more tiles than one word has bits
    ragged("float16", 24, Sq=150, Sk=1600), (150, 20, 100), (9, 1600, 900),
    seen=masked_tiles((3, 4, 150, 1600), 128, 1, full=0.4),
)  # fmt: skip
KEYS_CUH = "attention/block_key_walk.cuh"
MODIFIED = [
    (EXPRESSIONS, Bug(PARAMS_CUH, "work.sequence.keys.count,", "longest.sk,")),
    (BLOCKS, Bug(KEYS_CUH, "lists.queries()", "place.sq")),
    (BLOCKS, Bug(KEYS_CUH, "div_up(lists.keys(), kTileK);", "div_up(place.sk, kTileK);")),
]


@pytest.mark.parametrize(("problem", "bug"), MODIFIED)
def test_wrong_lengths_of_expressions_are_found(problem, bug, ratio_with, monkeypatch):
    monkeypatch.setattr(block_masks, "KERNELS", NUMPY)
    monkeypatch.setattr(
        sys.modules["cupyattn.functional.attention.block_mask"],
        "device_of",
        lambda _: EmulatedDevice(Checks.all()),
    )
    assert ratio_with(problem) <= 1
    with suppress(KernelFault):  # which is as good
        assert not ratio_with(problem, bug) <= 1


@pytest.fixture
def gradient_ratios_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, float]]:
    """Run a backward from sources with bugs in them; returns errors over bounds."""

    def run(problem: VarlenProblem, deterministic: bool, *bugs: Bug) -> dict[str, float]:
        planted_device(monkeypatch, tmp_path / "cuda_src", *bugs, modules=["varlen_backward"])
        arrays, bounds, options = problem.backward_inputs()
        grads = cupyattn.attention_varlen_backward(
            *arrays, *bounds, *problem.longest, **options, deterministic=deterministic
        )
        return problem.backward_ratios(
            {name: x for name, x in grads._asdict().items() if x is not None}
        )

    return run


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("problem", [HALF, FLOAT, MANY], ids=["half", "float", "many"])
def test_a_clean_copy_has_right_gradients(problem, deterministic, gradient_ratios_with):
    ratios = gradient_ratios_with(problem, deterministic)
    assert 0 < max(ratios.values()) <= 1, ratios


GRADIENTS_CUH = "attention/varlen_backward_params.cuh"
QUERIES_CUH = "attention/tensor_core/query_feed.cuh"
DELTA_CU, CONVERT_CU, DKDV_CU, DQ_CU = (
    f"attention/tensor_core/backward_{name}_varlen.cu"
    for name in ("delta", "convert", "dkdv", "dq")
)
FLOAT_DELTA_CU, FLOAT_DKDV_CU = (
    f"attention/float32/backward_{name}_varlen.cu" for name in ("delta", "dkdv")
)
WRONG_GRADIENTS = [
    (HALF, False, Bug(GRADIENTS_CUH, "(queries.begin + batch * kRowPad)", "(queries.begin)")),
    (HALF, False, Bug(DELTA_CU, "rows.begin + row,", "row,")),
    (FLOAT, False, Bug(FLOAT_DKDV_CU, "rows_from(dq_g, own.dq, queries)", "dq_g")),
    (HALF, False, Bug(DKDV_CU, "rows_from(dk_g, own.dk, own_keys)", "dk_g")),
    (HALF, False, Bug(QUERIES_CUH, "(walk.tiles() - 1) * tile_bytes", "walk.tiles() * tile_bytes")),
    (HALF, False, Bug(ROWS_CUH, "(31 - __clz(begun | 1u))", "__ffs(begun)")),
    (HALF, False, Bug(GRADIENTS_CUH, "own.attention.sq = sequence.queries.count;", "")),
    (HALF, False, Bug(CONVERT_CU, "rows_from(dq_g, backward.dq, rows)", "dq_g")),
    (HALF, False, Bug(DKDV_CU, "rows_from(q_g, longest.q, queries)", "q_g")),
    (HALF, False, Bug(DKDV_CU, "place.scratch_begin = scratch_begin(", "(void)scratch_begin(")),
    (MANY, False, Bug(ROWS_CUH, "< batch) step *= kWarpSize;", "< batch) step *= 2;")),
    (HALF, True, Bug(DQ_CU, "rows_from(k_g, longest.k, keys)", "k_g")),
    (HALF, True, Bug(DQ_CU, "/*scratch_batch=*/0", "place.batch")),
    (FLOAT, True, Bug(FLOAT_DELTA_CU, "rows.begin) * forward.heads", "rows.begin)")),
    (FLOAT, False, Bug(GRADIENTS_CUH, "tile.tile * keys_per_cta", "0 * keys_per_cta")),
]


@pytest.mark.parametrize(("problem", "deterministic", "bug"), WRONG_GRADIENTS)
def test_wrong_gradients_are_found(problem, deterministic, bug, gradient_ratios_with):
    with suppress(KernelFault):  # which is as good
        ratios = gradient_ratios_with(problem, deterministic, bug)
        assert not max(ratios.values()) <= 1, ratios  # NaN too
