"""Bugs planted in the kernels of decoding are found: by the emulator's checks, or by the bounds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.paged import PagedProblem
from support.planted_bugs import Bug, PlantedDevice, plant, without_barrier
from support.search import deep

import cupyattn
from cupyattn.emulator import Checks, KernelFault, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

FORWARD_CU, COMBINE_CU = "attention/decode/forward.cu", "attention/decode/combine.cu"
SHARES_CUH, FEED_CUH = "attention/decode/shares.cuh", "attention/decode/block_feed.cuh"
ROWS_CUH, END_CUH = "attention/decode/query_rows.cuh", "attention/decode/row_end.cuh"
TENSOR_CUH, FLOAT_CUH = (
    "attention/decode/tensor_core_rows.cuh",
    "attention/decode/float_rows.cuh",
)
# Several units a sequence and CTA; rows of a second tile; every option.
HALF = PagedProblem(
    lengths=(0, 700, 37, 130), Sq=3, G=1, group=6, D=64, dtype="float16", block_size=32,
    options=(("causal", True), ("window_size", (600, 0)), ("alibi_slopes", True),
             ("softcap", 3.0), ("sinks", True)),
)  # fmt: skip
FLOAT = replace(HALF, dtype="float32", D=24, group=4, lengths=(0, 300, 37, 130))
# More than two times the 32 tiles whose blocks a warp looks up at once, in each of four CTAs.
LONG = PagedProblem(lengths=(17_000,), Sq=1, G=1, group=8, D=24, dtype="float32")
MULTIPROCESSORS = 2


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a problem from sources with bugs in them; returns its error over the bound."""

    def run(problem: PagedProblem, *bugs: Bug) -> float:
        folder = tmp_path / "cuda_src"
        plant(folder, *bugs)
        device = PlantedDevice(folder, Checks.all())
        module = sys.modules["cupyattn.functional.attention.paged"]
        monkeypatch.setattr(module, "device_of", lambda _: device)
        monkeypatch.setattr(PlantedDevice, "multiprocessors", MULTIPROCESSORS)
        arrays = problem.arrays()
        out, lse = cupyattn.paged_attention(*arrays, **problem.keywords(), return_lse=True)
        return problem.ratio(out, lse, arrays)

    return run


@pytest.mark.parametrize("problem", [HALF, FLOAT, LONG], ids=["half", "float", "long"])
def test_a_clean_copy_is_right(problem, ratio_with):
    assert 0 < ratio_with(problem) <= 1


WRONG = [
    (HALF, Bug(FORWARD_CU, "first_key + kTileKeys > seen_to", "first_key > seen_to")),
    (HALF, Bug(SHARES_CUH, "cta * each + min(cta, longer)", "cta * each + min(cta, longer - 1)")),
    (HALF, Bug(SHARES_CUH, "2 * cta + (cta == first_cta)", "2 * cta")),
    (HALF, Bug(COMBINE_CU, "sum.l = __fmaf_rn(weight, part.y, sum.l)", "sum.l += part.y")),
    (LONG, Bug(FEED_CUH, "if (j + kWarpSize < count) ahead", "if (j < 0) ahead")),
    (HALF, Bug(FORWARD_CU, "if (edge) warp.rows.clear_v", "if (first_key < 0) warp.rows.clear_v")),
    (HALF, Bug(TENSOR_CUH, "first, second, 0x7632", "second, first, 0x7632")),
]
WRONG_DEEP = [
    (HALF, Bug(SHARES_CUH, "(params, seqlens_g, next.batch)", "(params, seqlens_g, 0)")),
    (HALF, Bug(COMBINE_CU, "cta <= last_cta; cta++", "cta < last_cta; cta++")),
    (HALF, Bug(FEED_CUH, "mine % block_tiles * kTileKeys", "0")),
    (HALF, Bug(ROWS_CUH, "return (first + row) / params.group", "return row / params.group")),
    (HALF, Bug(END_CUH, "total = l * scale + ex2", "total = l + ex2")),
    (HALF, Bug(FORWARD_CU, "l[i] *= factor[i];", "")),
    (HALF, Bug(TENSOR_CUH, "movmatrix_trans(pack_halves(s[n][2 * half], s[n][2 * half + 1]))",
               "pack_halves(s[n][2 * half], s[n][2 * half + 1])")),
    (FLOAT, Bug(FLOAT_CUH, "row_factor = __shfl_sync(kFullWarp, own, holder(0, r))",
                "row_factor = own")),
    (FLOAT, Bug(FLOAT_CUH, "distance = kLanes; distance", "distance = 2 * kLanes; distance")),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "bug"), [*WRONG, *deep(*WRONG_DEEP)])
def test_wrong_results_are_found(problem, bug, ratio_with):
    with suppress(KernelFault):  # which is as good
        assert ratio_with(problem, bug) > 1


@pytest.mark.parametrize(
    "comment",
    [
        "smem: written by every warp",
        *deep("smem: read by every warp, before the next pass or segment writes it"),
    ],
)
def test_barriers_that_are_missing_are_found(comment, ratio_with):
    with pytest.raises(SharedMemoryRaceError):
        ratio_with(HALF, without_barrier(FORWARD_CU, comment))


def test_an_entry_read_past_a_sequence_is_found(ratio_with):
    """It is wild: the block that it names lies outside of the cache."""
    bug = Bug(FEED_CUH, "min(j + lane_index(), count - 1)", "j + lane_index()")
    problem = replace(HALF, lengths=(16,), Sq=1)
    arrays = problem.arrays()
    assert np.count_nonzero(arrays[3] == 2**30) == arrays[3].size - 1
    with pytest.raises(KernelFault):
        ratio_with(problem, bug)
