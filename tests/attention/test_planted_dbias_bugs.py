"""Bugs planted in the kernel for the gradient of a bias that broadcasts are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.backward_runs import error_ratios, inputs
from support.planted_bugs import Bug, found_by, planted_device, without_barrier
from support.strategies import AttentionProblem

import cupyattn
from cupyattn.emulator import KernelFault, OutOfBoundsError, SharedMemoryRaceError
from cupyattn.kernels.configs.attention.tensor_core.backward_summed_dbias import SUMMED_DBIAS
from cupyattn.ops.attention import backward, dbias

pytestmark = pytest.mark.nvrtc

WALK = "attention/tensor_core/backward_summed_dbias.cuh"
PAIRS = "attention/tensor_core/bias_pairs.cuh"
QUADS, FEED = "attention/tensor_core/quad_rows.cuh", "attention/tensor_core/tile_feed.cuh"
ITEMS = "attention/tensor_core/score_items.cuh"
ROWS, KEYS = SUMMED_DBIAS[75][32].tile_rows, SUMMED_DBIAS[75][32].tile_k


def problem(sq: int, sk: int, bias: tuple[int, ...], **drawn: object) -> AttentionProblem:
    return AttentionProblem(
        B=2, Sq=sq, Sk=sk, H=4, G=2, D=24, Dv=24, dtype="float16",
        drawn=(("bias", (bias, "float16")), *drawn.items()),
    )  # fmt: skip


# Windows that hide one score of the second tile of keys: on its left the last query's, on its right
# the first one's; and causal order that leaves one of it.
LEFT, RIGHT = (
    problem(rows, 3 * KEYS, (rows, 3 * KEYS), window_size=(KEYS, right), q_offset=KEYS)
    for rows, right in ((KEYS + 2, KEYS - 1), (KEYS + 1, KEYS - 2))
)
CAUSAL = problem(ROWS + 1, 2 * KEYS + 4, (1, 4, ROWS + 1, 2 * KEYS + 4), causal=True)
CORNER = problem(KEYS + 1, 3 * KEYS, (KEYS + 1, 3 * KEYS), causal=True, q_offset=0)
ROW = problem(60, KEYS + 4, (KEYS + 4,))
COLUMN = problem(60, KEYS + 4, (60, 1))


@pytest.fixture
def ratio_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a problem from sources with bugs in them; returns dbias's error over its bound."""

    def run(asked: AttentionProblem, *bugs: Bug, parts: int = 1, scale: float = 1.0) -> float:
        planted_device(monkeypatch, tmp_path / "cuda_src", *bugs, modules=["backward"])
        tiles = -(-asked.Sq // ROWS) * -(-asked.Sk // KEYS)
        shape = (1,) * (4 - len(asked.drawn[0][1][0])) + asked.drawn[0][1][0]
        monkeypatch.setattr(dbias, "_ENOUGH_CTAS", parts * tiles * shape[0] * shape[1])
        backward._plan.cache_clear()
        arrays, options = inputs(asked)
        (dout, *others), dlse = arrays, options["dlse"]
        factors = np.where(np.arange(4) < 2, scale, 1)  # of the heads of one key-value head
        dout = (dout * factors[:, None]).astype(np.float16)
        arrays = (dout, *others)
        options["dlse"] = (dlse * factors[:, None]).astype(np.float32)
        grads = cupyattn.attention_backward(*arrays, **options)
        backward._plan.cache_clear()
        found = {name: x for name, x in grads._asdict().items() if x is not None}
        return error_ratios(found, arrays, options)["dbias"]

    return run


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("asked", [CAUSAL, LEFT, RIGHT, CORNER, ROW, COLUMN])
def test_a_clean_copy_is_right(
    asked: AttentionProblem, parts: int, ratio_with: Callable[..., float]
):
    ratio = ratio_with(asked, parts=parts, scale=1000.0)
    assert 0 < ratio <= 1, ratio


FAULTS = {
    "the next keys while these are read": (
        without_barrier(WALK, "K and V: this half has been read, the other one written"),
        SharedMemoryRaceError,
    ),
    "keys before they are written": (
        without_barrier(WALK, "K and V: the first tile has been written"),
        SharedMemoryRaceError,
    ),
    "a query too many": (Bug(QUADS, "row < rows &&", "row <= rows &&"), OutOfBoundsError),
    "a key-value head for each head": (
        Bug(WALK, "pair.head / params.group", "pair.head"), OutOfBoundsError
    ),
    "padded columns of queries": (
        Bug(QUADS, "chunk * kChunkItems < kCols)", "chunk * kChunkItems < kCols + 8)"),
        OutOfBoundsError,
    ),
    "padded columns of keys": (
        Bug(FEED, "kChunkItems >= kCols) continue;", "kChunkItems >= kCols + 8) continue;"),
        OutOfBoundsError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, ratio_with: Callable[..., float]):
    bug, fault = FAULTS[name]
    with found_by(fault):
        ratio_with(CAUSAL, bug)


# Each with the problem that shows it, and how many parts there are.
MISTAKES = {
    "the same half again": (Bug(WALK, "    half ^= 1;\n", ""), CAUSAL, 1),
    "a tile that the window cuts on its right counts as whole": (
        Bug(PAIRS, "behind <= top.end}", "behind <= top.end + 1}"), RIGHT, 1
    ),
    "a tile that the window cuts on its left counts as whole": (
        Bug(PAIRS, "bottom.begin <= first_key", "bottom.begin <= first_key + 1"),
        LEFT,
        1,
    ),
    "no tile is cut": (Bug(PAIRS, "pair.masked = !sight.all", "pair.masked = false"), CAUSAL, 1),
    "a tile of whose keys one is seen is skipped": (
        Bug(PAIRS, "first_key < bottom.end,", "first_key + 1 < bottom.end,"), CORNER, 1
    ),
    "a pair is passed over": (
        Bug(PAIRS, "pair.left--;\n    if", "pair.left -= 2;\n    if"), CAUSAL, 1
    ),
    "one batch element": (Bug(PAIRS, "    pair.batch++;\n", ""), CAUSAL, 1),
    "all heads in place of one": (
        Bug(PAIRS, "work.heads == 1 ? heads : own.head + 1", "heads"), CAUSAL, 1
    ),
    "a part begins with the first pair": (
        Bug(PAIRS, "begin = own.part * count / work.parts;", "begin = 0;"), LEFT, 3
    ),
    "parts in one place": (
        Bug(WALK, "place.batch + (work.batches == 1 ? place.part : 0)", "place.batch"), LEFT, 3
    ),
    "the scale of the next pair": (
        Bug(WALK, "own_scale.up, warp", "scale.up, warp"), LEFT, 1
    ),
    "half of a warp's rows": (Bug(WALK, "of_lanes(sum, 4, 16)", "of_lanes(sum, 4, 8)"), ROW, 1),
    "half of a tile's keys": (Bug(WALK, "of_lanes(sum, 1, 2)", "of_lanes(sum, 1, 1)"), COLUMN, 1),
    "one tile of rows": (Bug(WALK, "tile[i][e] + tile[i][2 + e]", "tile[i][e]"), ROW, 1),
    "a bias's rows too close": (
        Bug(ITEMS, "(row - first_row) * strides.row + (key - first_key)",
            "(row - first_row) / 8 * strides.row + (key - first_key)"),
        CAUSAL,
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bounds(name: str, ratio_with: Callable[..., float]):
    bug, asked, parts = MISTAKES[name]
    try:
        ratio = ratio_with(asked, bug, parts=parts, scale=1000.0)
    except KernelFault:
        return
    assert not ratio <= 1, ratio
