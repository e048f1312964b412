"""Bugs planted in the attention kernels inside their arrays: the error bound finds them.

No check of memory can see them.
"""

from __future__ import annotations

import pytest
from support.planted_bugs import (
    F32_FEED_CUH,
    F32_PRODUCTS_CUH,
    KEY_FEED_CUH,
    PRODUCTS_CUH,
    Bug,
    attention_recorded,
    error_ratio,
)

pytestmark = pytest.mark.nvrtc

MISTAKES = {
    "flash: K of the neighbouring k8 step": Bug(
        PRODUCTS_CUH, "kGroupChunks + step], b[step])", "kGroupChunks + step], b[0])"
    ),
    "flash: V of the neighbouring columns": Bug(PRODUCTS_CUH, "a[i], b[tile])", "a[i], b[0])"),
    "flash: the first tile in the wrong half": Bug(
        KEY_FEED_CUH, "store_k(k_quads, k_s(half));", "store_k(k_quads, k_s(half ^ 1));"
    ),
    "flash f32: K of the neighbouring columns": Bug(
        F32_PRODUCTS_CUH,
        "step * Slice::kKColumnBytes",
        "(step ^ 1) * Slice::kKColumnBytes",
    ),
    "flash f32: P of the neighbouring rows": Bug(
        F32_PRODUCTS_CUH, "ld_shared_group(p, i,", "ld_shared_group(p, i ^ 4,"
    ),
    "flash f32: V of the neighbouring keys": Bug(
        F32_FEED_CUH,
        "return Scores::key_at(8 * panel + row / 2, pair, row % 2);",
        "return Scores::key_at(8 * panel + row / 2, pair, (row + 1) % 2);",
    ),
    "flash f32: K in another order than P": Bug(
        F32_FEED_CUH, "kColumnLanes, item / 2, item % 2);", "kColumnLanes, item % 4, item / 4);"
    ),
    "flash f32: what was accumulated keeps its scale": Bug(
        "attention/float32/softmax.cuh", "acc[i][c] *= shrink;", "acc[i][c] *= 1.f;"
    ),
    "flash f32: the maximum of half of the row's lanes": Bug(
        "attention/float32/score_tile.cuh",
        "distance < 2 * kColumnLanes; distance",
        "distance < kColumnLanes; distance",
    ),
    "flash f32: a row sees one key too many": Bug(
        "attention/float32/score_tile.cuh", "8 * n + e >= end", "8 * n + e > end"
    ),
    "flash: a row sees one key too many": Bug(
        "attention/tensor_core/score_tile.cuh",
        "Tile::key_step(n, e) >= end",
        "Tile::key_step(n, e) > end",
    ),
    "flash: a cut tile counts as full": Bug(
        "attention/key_walk.cuh",
        "full_end = top.end / kTileK;",
        "full_end = div_up(top.end, kTileK);",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_attention_kernel_is_outside_its_bound(name, start_with):
    recorded = attention_recorded(name.partition(":")[0])
    start_with(recorded, MISTAKES[name])
    assert not error_ratio(recorded) <= 10
