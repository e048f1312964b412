"""Tiles of products from sm_80 on, whose operands cp.async copies to shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cupyattn.ops.linear.tiles import Lines, Moves, Shape, TileConfig

_Tile = tuple[int, int, int, int, int, int]
_UNUSED = Moves(0, 0, 0)


def native_config(
    tile: _Tile, stages: int, models: float, why: str, *, a_sets: int = 2
) -> TileConfig:
    """Return a configuration whose operands are copied by cp.async."""
    config = TileConfig(*tile, _UNUSED, _UNUSED, a_sets, models)
    return replace(config, mma_k=16, stages=stages, native=True, why=why)


_WIDE = "the largest tile: L2 and shared memory deliver a fifth less than for 128 x 256"
_NARROW = "for results that fill it better than 256 x 192"
_SHORT = "for short sums, whose stores overlap the products of another CTA"
_SMALL = "for small results and few rows"


# By the shared memory of a CTA: 163 KiB on sm_80 and sm_87, 99 on sm_86, sm_89 and sm_120, 227 on
# sm_90 and sm_100. TFLOP/s on an H200 at its power limit (2026-11-28, float16, 8192 x 8192 x 4096,
# w along the sum, medians of three rounds): 458 with 256 x 192 and k-tiles of 64, 453 with k-tiles
# of 32; 440 with 128 x 256, 401 with two sets of A's fragments; 449 with 128 x 128. For a result of
# 8192 x 4096, which 256 x 192 fills worse, 474 with 128 x 256 and 434 with 256 x 192. L2 delivers
# 22 % less for 256 x 192 than for 128 x 256. These are of a script that is not kept: `benchmark
# linear` has 493 (2026-11-29). No other device has been measured: there `models` and tiles are
# estimates.
_NATIVE_99: Mapping[Shape, TileConfig] = {
    "wide": native_config(
        (128, 256, 32, 64, 64, 1), 4, 0.9, "the largest tile of which shared memory holds 4 k-tiles"
    ),
    "narrow": native_config(
        (256, 128, 32, 64, 64, 1), 4, 0.9, "for results that fill it better than 128 x 256"
    ),
    "short": native_config((128, 128, 32, 64, 64, 2), 3, 0.85, _SHORT),
    "small": native_config((64, 128, 32, 32, 64, 2), 4, 0.6, _SMALL),
}
_NATIVE_163: Mapping[Shape, TileConfig] = {
    "wide": native_config((256, 192, 32, 64, 96, 1), 5, 0.95, _WIDE, a_sets=1),
    "narrow": native_config((128, 256, 64, 64, 64, 1), 3, 0.9, _NARROW, a_sets=1),
    "short": native_config((128, 128, 32, 64, 64, 2), 4, 0.85, _SHORT),
    "small": native_config((64, 128, 32, 32, 64, 3), 4, 0.65, _SMALL),
}
_NATIVE_227: Mapping[Shape, TileConfig] = {
    "wide": native_config((256, 192, 64, 64, 96, 1), 4, 0.95, _WIDE, a_sets=1),
    "narrow": native_config((128, 256, 64, 64, 64, 1), 4, 0.9, _NARROW, a_sets=1),
    "short": native_config((128, 128, 64, 64, 64, 2), 3, 0.85, _SHORT),
    "small": native_config((64, 128, 64, 32, 64, 3), 3, 0.65, _SMALL),
}
NATIVE_TILES = {
    80: _NATIVE_163,
    86: _NATIVE_99,
    87: _NATIVE_163,
    89: _NATIVE_99,
    90: _NATIVE_227,
    120: _NATIVE_99,
}
"""Configurations with cp.async by architecture and tile."""


# A k-tile is 32 items, a block of codes or a part of one. Fewer columns than rows: each weight is
# decoded once for each tile of rows.
DECODING_TILES: Mapping[Shape, TileConfig] = {
    "narrow": native_config(
        (256, 128, 32, 64, 64, 1), 4, 0.85, "each weight is decoded for 256 rows"
    ),
    "small": native_config(
        (128, 128, 32, 64, 64, 2), 3, 0.75, "for small results: each weight is decoded for 128 rows"
    ),
    "few": native_config(
        (64, 128, 32, 32, 64, 2), 4, 0.6, "for few rows, which decoding each weight bounds"
    ),
}
"""Configurations of a quantised weight, whose codes pass registers, for any device."""


def native_rows(
    turing: Mapping[tuple[Shape, Lines], TileConfig],
) -> dict[int, Mapping[tuple[Shape, Lines], TileConfig]]:
    """Return a table: Turing's configurations, and for newer devices those with cp.async."""
    directions = {lines: None for _, lines in turing}
    native = {
        arch: {(shape, lines): tiles[shape] for shape in tiles for lines in directions}
        for arch, tiles in NATIVE_TILES.items()
    }
    return {75: turing, **native}
