"""Bugs planted in linear's tensor-core kernels are found: by checks, or by the bounds."""

from __future__ import annotations

from typing import Any

import pytest
from support.linear_problems import LinearCase
from support.planted_bugs import Bug, without_barrier
from support.tensor_core_linear import tensor_core_alone

from cupyattn.emulator import KernelFault, OutOfBoundsError, SharedMemoryRaceError

pytestmark = pytest.mark.nvrtc

FEED, LOOP, EPILOGUE, PARAMS, FORWARD, TILE, PRODUCT, GRADIENT, SUMS = (
    f"linear/tensor_core/{name}"
    for name in (
        "operand_feed.cuh", "tile_product.cuh", "epilogue.cuh", "params.cuh",
        "forward.cu", "forward_tile.cuh", "product.cu", "preactivation_gradient.cu",
        "split_sums.cu",
    )
)  # fmt: skip


@pytest.fixture
def small_ratio_with(ratio_with):
    """The same by these kernels alone, in their smallest tile or, for long sums, in parts."""

    def ratio(case: LinearCase, backward: bool, *bugs: Bug) -> float:
        split = backward and case.M[0] >= 2048
        with tensor_core_alone(None if split else "small"):
            return ratio_with(case, backward, *bugs)

    return ratio


def case(rows: int, outer: int, inner: int, activation: str | None = None, **more: Any):
    return LinearCase((rows,), inner, outer, "float16", activation, **more)


PLAIN = case(70, 72, 104, residual=True)
TURNED = case(70, 72, 104, turned=True)
GATED = case(70, 40, 40, "swiglu", residual=True)
ITEMS = case(33, 35, 37)
ADDED = case(70, 72, 40, "silu", accumulate=True)
LONG = case(2048, 40, 72, biased=False)


@pytest.mark.parametrize(
    ("problem", "backward"),
    [(PLAIN, False), (GATED, False), (ITEMS, False), (ADDED, True), (LONG, True)],
    ids=["plain", "gated", "items", "backward", "split"],
)
def test_a_clean_copy_is_right(problem, backward, small_ratio_with):
    assert 0 < small_ratio_with(problem, backward) <= 1


@pytest.mark.parametrize(
    ("problem", "backward", "file", "comment"),
    [
        (PLAIN, False, LOOP, "stages: this one has been read, the other one written"),
        (PLAIN, False, LOOP, "stages: the first one has been written"),
        (case(70, 72, 40, "silu"), True, GRADIENT, "smem_s.sums: written by every warp"),
    ],
)
def test_a_barrier_dropped_is_found(problem, backward, file, comment, small_ratio_with):
    with pytest.raises((SharedMemoryRaceError, KernelFault)):
        small_ratio_with(problem, backward, without_barrier(file, comment))


# the problem, whether it is the backward's, the bug
FAULTS: dict[str, tuple[LinearCase, bool, Bug]] = {
    "rows are clamped to one too many": (
        TURNED, False,
        Bug(FEED, "min(kOuterItems, outer_items) - 1", "min(kOuterItems, outer_items)"),
    ),
    "columns are clamped to a chunk too many": (
        PLAIN, False, Bug(FEED, "(outer_items - 1) / kChunkItems", "outer_items / kChunkItems"),
    ),
    "the first k-tile is not ragged": (
        case(70, 72, 24, turned=True), False,
        Bug(LOOP, "(fetched[i], i, 0, first_items)", "(fetched[i], i, 0, kInner)"),
    ),
    "there is always a second k-tile": (
        case(70, 72, 24), False, Bug(LOOP, "tiles > 1 ? kInner : 0", "kInner"),
    ),
    "there is always one more k-tile": (
        TURNED, False, Bug(LOOP, "tiles > (wraps ? 2 : 1) ? kInner : 0", "kInner"),
    ),
    "an item too many of a line": (
        ITEMS, False, Bug(FEED, "item[i] = i < valid", "item[i] = i <= valid"),
    ),
    "a row too many is stored": (
        PLAIN, False, Bug(EPILOGUE, "exists = row < place.rows", "exists = row <= place.rows"),
    ),
    "a column too many is stored": (
        ITEMS, False,
        Bug(EPILOGUE, "if (column + i < columns) items_g", "if (column + i <= columns) items_g"),
    ),
    "a bias too many is read": (
        PLAIN, False, Bug(TILE, "&& column < columns;", "&& column <= columns;"),
    ),
    "tiles of rows that do not exist": (
        case(260, 8, 8), False, Bug(FORWARD, "if (first_row >= params.rows) return;", ""),
    ),
    "a row too many of dz": (
        case(70, 72, 40, "silu"), True, Bug(GRADIENT, "params.rows);", "params.rows + 1);"),
    ),
    "the last part is as long as the others": (
        case(2052, 40, 72, biased=False), True,
        Bug(PRODUCT, "min(params.split_inner, params.inner - first_inner)", "params.split_inner"),
    ),
    "a part too many is added": (
        LONG, True, Bug(SUMS, "part < parts", "part <= parts"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_an_access_out_of_bounds_is_found(name, small_ratio_with):
    problem, backward, bug = FAULTS[name]
    with pytest.raises(OutOfBoundsError):
        small_ratio_with(problem, backward, bug)


MISTAKES: dict[str, tuple[LinearCase, bool, Bug]] = {
    "the first k-tile begins with what was there": (
        case(70, 72, 40), False,
        Bug(LOOP, "fetched[Feed::kFetches] = {};", "fetched[Feed::kFetches] = {{0x3c003c00u}};"),
    ),
    "the first of several k-tiles is not ragged": (
        TURNED, False, Bug(LOOP, "(fetched[i], i, 0, first_items)", "(fetched[i], i, 0, kInner)"),
    ),
    "the second k-tile is the first again": (
        PLAIN, False, Bug(LOOP, "    feed.advance(first_items);\n", ""),
    ),
    "the bias of the neighbouring column": (
        PLAIN, False, Bug(TILE, "lane_index() % 4 * 2 + e;", "lane_index() % 4 * 2 + (1 - e);"),
    ),
    "lanes exchange the wrong words": (
        PLAIN, False, Bug(EPILOGUE, "upper ? low : high", "upper ? high : low"),
    ),
    "the residual in the order of fragments": (
        PLAIN, False,
        Bug(EPILOGUE, "    transpose_in_quad(words);\n#pragma", "#pragma"),
    ),
    "up goes through the activation": (
        GATED, False, Bug(TILE, "value(acc[m][2 * n][2", "value(acc[m][2 * n + 1][2"),
    ),
    "halves of a gated weight are one": (
        GATED, False, Bug(PARAMS, "kPaired ? position / kPairItems % 2 : 0", "0"),
    ),
    "fragments of the step before": (
        PLAIN, False, Bug(LOOP, "next_step = (step + 1) % kSteps", "next_step = step"),
    ),
    "stages are not exchanged": (
        PLAIN, False, Bug(LOOP, "other_stage = 0u - other_stage;", ""),
    ),
    "the gradient of up goes to the gate": (
        case(70, 40, 40, "swiglu"), True,
        Bug(GRADIENT, "dz_g + row * width + half * params.columns", "dz_g + row * width"),
    ),
    "a warp's sums are left out": (
        case(70, 72, 40, "silu"), True,
        Bug(GRADIENT, "for (int warp = 0; warp < kWarps;", "for (int warp = 1; warp < kWarps;"),
    ),
    "the addend is forgotten": (
        ADDED, True, Bug(EPILOGUE, "if (addend.array_g != nullptr)", "if (false)"),
    ),
    "each part is the first": (
        LONG, True, Bug(PRODUCT, "SPLIT ? cta.split * params.split_inner : 0", "0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_outside_the_bound(name, small_ratio_with):
    problem, backward, bug = MISTAKES[name]
    try:
        ratio = small_ratio_with(problem, backward, bug)
    except KernelFault:
        return  # found even sooner
    assert not ratio <= 1.5
