"""Bugs planted where kernels walk a block mask's tiles are found: by the emulator, or by bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import block_masks
from support.block_masks import Case, masked_tiles
from support.devices import NUMPY
from support.planted_bugs import Bug, planted_device
from support.strategies import AttentionProblem

from cupyattn.emulator import KernelFault

pytestmark = pytest.mark.nvrtc

MASK, TILES = "attention/block_mask.cu", "attention/block_lists.cu"
LISTS, SCORES = "attention/block_lists.cuh", "attention/scores.cuh"
KEYS, QUERIES = "attention/block_key_walk.cuh", "attention/block_query_walk.cuh"
FEED, FORWARD = (
    "attention/tensor_core/block_query_feed.cuh",
    "attention/tensor_core/forward.cuh",
)
STATES, HALF_DBIAS = (
    "attention/block_states.cuh",
    "attention/tensor_core/backward_summed_dbias.cuh",
)
HALF_DKDV = "attention/tensor_core/backward_dkdv.cuh"
HALF_GRADIENT = "attention/tensor_core/score_gradient.cuh"
FLOAT_DQ, FLOAT_DKDV = "attention/float32/backward_dq.cuh", "attention/float32/backward_dkdv.cuh"


def case(dtype: str) -> Case:
    """Two heads of one group with masks of their own; rows, keys and a window that end in tiles."""
    problem = AttentionProblem(
        B=1, Sq=290, Sk=310, H=2, G=1, D=8, Dv=8, dtype=dtype, drawn=(), seed=2
    )
    seen = masked_tiles((1, 2, 290, 310), 128, 3, full=0.4)
    seen[:, 0, :128, :128], seen[:, 1, :128, :128] = True, False
    seen[:, 0, 128:256, :128] = np.arange(128) % 2 == 0
    seen[:, 0, 128:256, 128:], seen[:, 0, 256:] = True, True  # the window cuts them
    return Case(problem, seen, (("window_size", (200, 90)),))


CASES = {dtype: case(dtype) for dtype in ("float16", "float32")}
BIAS = np.random.default_rng(1).standard_normal((290, 310)).astype(np.float32)
FINE = masked_tiles((1, 2, 290, 310), 16, 3)  # warps of a tile see other states
WITH_BIAS = {
    dtype: replace(each, seen=FINE, options=(*each.options, ("bias", BIAS)))
    for dtype, each in CASES.items()
}


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """Run a block mask, forward or backward, from sources with bugs in them."""

    def run(dtype: str, what: str, *bugs: Bug) -> float:
        monkeypatch.setattr(block_masks, "KERNELS", NUMPY)
        folder, modules = tmp_path / "cuda_src", ("forward", "backward", "block_mask")
        planted_device(monkeypatch, folder, *bugs, modules=modules)
        if what == "forward":
            return max(CASES[dtype].forward_ratios().values())
        if what == "dbias":
            return WITH_BIAS[dtype].backward_ratios()["dbias"]
        ratios = CASES[dtype].backward_ratios(deterministic=what == "deterministic")
        return max(ratios.values())

    return run


@pytest.mark.parametrize("what", ["forward", "one pass", "deterministic", "dbias"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_clean_copy_is_right(dtype, what, ratio_with):
    assert 0 < ratio_with(dtype, what) <= 1


BUGS = [
    ("float16", "forward", Bug(MASK, "all = all && seen;", "all = seen;")),
    ("float16", "forward", Bug(TILES, "all_of_part && state == 2", "all_of_part && state != 0")),
    ("float16", "forward", Bug(TILES, "kStateBits * part", "0 * part")),
    ("float16", "forward", Bug(LISTS, "* list_items(walked_tiles);", "* walked_tiles;")),
    ("float16", "forward", Bug(LISTS, "fulls_before(full_end, listed", "fulls_before(end, listed")),
    ("float16", "forward", Bug(KEYS, "place.first_row / kTileQ,", "0,")),
    ("float16", "forward", Bug(FORWARD, "partial = state == kPartial;", "partial = false;")),
    ("float16", "one pass", Bug(TILES, "OF_KEYS ? static_cast<int64>(j) * columns + i :", "")),
    ("float16", "one pass", Bug(QUERIES, "first_head + 1, own", "first_head, own")),
    ("float16", "one pass", Bug(FEED, "return present_masked;", "return false;")),
    ("float16", "one pass", Bug(FEED, "    this->scratch_row = ::scratch_row(", "    (void)(")),
    ("float16", "one pass", Bug(HALF_DKDV, "row / 8 + n, kNothing);", "0, kNothing);")),
    ("float16", "dbias", Bug(STATES, "state != kEmpty);", "state == kFull);")),
    ("float16", "dbias", Bug(STATES, "!exists || state == kFull", "state != kEmpty")),
    ("float16", "dbias", Bug(STATES, "* kWarpSpans * kColumns + column", "* kColumns + column")),
]  # fmt: skip
DEEP_BUGS = [
    ("float16", "dbias", Bug(STATES, "batch * blocks.strides[0] + head *", "batch * 0 + 0 *")),
    ("float16", "dbias", Bug(STATES, "&& row < rows && column < columns", "&& column < columns")),
    ("float16", "dbias", Bug(STATES, "kColumns + column;", "kColumns;")),
    ("float16", "dbias", Bug(HALF_DBIAS, "pair.masked, state != kFull", "pair.masked, false")),
    ("float16", "forward", Bug(LISTS, "strides[0] + head * strides[1]", "strides[0] + head * 0")),
    ("float16", "forward", Bug(LISTS, "full < edge_before", "full < 0")),
    ("float16", "forward", Bug(LISTS, "asked < masked ? whole", "asked < masked ? 0")),
    ("float16", "forward", Bug(FORWARD, "feed.turn_to_listed(next, next_tile);\n    } else",
                               "} else")),
    ("float16", "forward", Bug(KEYS, "(lists, place)[1].x) * kTileQ", "(lists, place)[1].x) * 0")),
    ("float16", "deterministic", Bug(HALF_GRADIENT, "!Modifiers::kBlocks || partial", "false")),
    ("float32", "forward", Bug(SCORES, "if (Modifiers::kBlocks && !partial) return;", "return;")),
    ("float32", "deterministic", Bug(FLOAT_DQ, "tile.state(0) != kFull", "false")),
    ("float32", "one pass", Bug(FLOAT_DKDV, "? min(Traits::kTileQ, sq - first_row)",
                                "? Traits::kTileQ")),
    ("float32", "one pass", Bug(QUERIES, "if (run == kBehindRun) run = kPartialRun;", "")),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "what", "bug"), [*BUGS, *DEEP_BUGS], ids=str)
def test_wrong_walks_are_found(dtype, what, bug, ratio_with):
    with suppress(KernelFault):  # then the emulator has found it
        assert ratio_with(dtype, what, bug) > 1


@pytest.mark.parametrize(
    "bug",
    [
        Bug(MASK, "min(first_row + TILE, sq)", "first_row + TILE"),
        Bug(MASK, "if (key >= sk) break;", ""),
        Bug(TILES, "min(own + own_span, owned)", "own + own_span"),
    ],
    ids=str,
)
def test_what_lies_behind_the_ends_is_not_read(bug, ratio_with):
    with pytest.raises(KernelFault):
        ratio_with("float16", "forward", bug)
