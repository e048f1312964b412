"""Tiles of products on tensor cores: how a CTA computes one, and the rows of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from cupyattn.runtime.arch import WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Specialisation


class Moves(NamedTuple):
    """When a thread stores what it has of the next k-tile, and asks for more.

    The loop over a k-tile has slots of 8 tensor-core instructions.
    """

    slot: int
    """Of the first store."""
    step: int
    """Slots from store to store."""
    ring: int
    """Loads on their way at a time."""


class Lines(NamedTuple):
    """Whether the lines of the operands run along the sum, or across it."""

    a: bool
    b: bool


@dataclass(frozen=True)
class ProductConfig:
    """One CTA for a tile of the result; tile_inner items of the sum at a time."""

    tile_rows: int
    tile_columns: int
    tile_inner: int
    warp_rows: int
    warp_columns: int
    ctas_per_sm: int
    a_moves: Moves
    b_moves: Moves
    a_sets: int
    """Of registers for fragments of A: 2 where they suffice."""
    models: float
    """The tensor utilisation of the main loop on a T4."""
    reason: str
    mma_k: int = 8
    """Items of the sum of one tensor-core instruction."""

    @property
    def threads(self) -> int:
        """Of a CTA."""
        warps = self.tile_rows // self.warp_rows * (self.tile_columns // self.warp_columns)
        return warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """Two stages of both operands."""
        return 2 * 2 * self.tile_inner * (self.tile_rows + self.tile_columns)


Shape = Literal["wide", "narrow", "small", "short", "few"]
"""Of a tile: the fastest; for results that would leave much of its columns empty; for small
results; for short sums, whose stores pass under the products of another CTA; for few rows, of a
quantised weight."""

ALONG, B_ACROSS, ACROSS = Lines(True, True), Lines(True, False), Lines(False, False)

_WIDE = (256, 192, 32, 64, 96, 1)
_NARROW = (256, 128, 32, 64, 64, 1)
_SMALL = (128, 128, 32, 64, 64, 2)
_SHORT = (128, 192, 16, 64, 96, 2)

_Table = Mapping[tuple[Shape, Lines], ProductConfig]

# `models` is by a static model of the machine code (NVRTC 12.9.86, 2026-11-22, +-0.05): no Turing
# card has been measured. The slots are the best of some dozens that were tried: ptxas places loads
# and stores otherwise for each. Of those that model alike, those that an H200 is fastest with as
# compute_75 code (2026-11-22, `benchmark linear`): it waits longer for memory and wants all of a
# k-tile on its way. Many rows, wide: 335 TFLOP/s at 8192 x 16384 x 4096, where the order before
# made 318. Narrow at 8192 x 2560 x 10240: 291, and 275 with w across; 265 and 227 before. Orders
# that model 0.87 and 0.83 make 307 and 292 there.
_TURING_FORWARD: _Table = {
    ("wide", ALONG): ProductConfig(
        *_WIDE, Moves(3, 2, 2), Moves(1, 3, 2), 1, 0.976, "shared memory is busy for 0.71 of it"
    ),
    ("wide", B_ACROSS): ProductConfig(*_WIDE, Moves(3, 1, 2), Moves(1, 5, 2), 1, 0.956, "the same"),
    ("narrow", ALONG): ProductConfig(
        *_NARROW, Moves(3, 1, 4), Moves(2, 1, 2), 1, 0.917, "shared memory is busy for 0.88 of it"
    ),
    ("narrow", B_ACROSS): ProductConfig(
        *_NARROW, Moves(2, 1, 3), Moves(1, 4, 2), 1, 0.915, "the same"
    ),
    ("small", ALONG): ProductConfig(
        *_SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.932, "shared memory is busy all the time"
    ),
    ("small", B_ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.891, "the same"
    ),
    ("short", ALONG): ProductConfig(
        *_SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.952, "shared memory is busy for 0.83 of it"
    ),
    ("short", B_ACROSS): ProductConfig(
        *_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.955, "the same"
    ),
}
_TURING_PRODUCT: _Table = {
    ("wide", ALONG): ProductConfig(
        *_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.938, "shared memory is busy for 0.71 of it"
    ),
    ("wide", B_ACROSS): ProductConfig(
        *_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.915, "the same"
    ),
    ("wide", ACROSS): ProductConfig(*_WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.943, "the same"),
    ("narrow", ALONG): ProductConfig(
        *_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.87, "shared memory is busy for 0.88 of it"
    ),
    ("narrow", B_ACROSS): ProductConfig(
        *_NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.88, "the same"
    ),
    ("narrow", ACROSS): ProductConfig(
        *_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.917, "the same"
    ),
    ("small", ALONG): ProductConfig(
        *_SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.828, "shared memory is busy all the time"
    ),
    ("small", B_ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.89, "the same"
    ),
    ("small", ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.906, "the same"
    ),
    ("short", ALONG): ProductConfig(
        *_SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.867, "shared memory is busy for 0.83 of it"
    ),
    ("short", B_ACROSS): ProductConfig(
        *_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.936, "the same"
    ),
    ("short", ACROSS): ProductConfig(*_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.939, "the same"),
}


def ampere_row(row: ProductConfig, b_moves: Moves) -> ProductConfig:
    """Return a row with two steps in one instruction: a slot is twice as long, 6 are left."""
    return replace(row, mma_k=16, a_sets=2, a_moves=Moves(0, 1, 4), b_moves=b_moves)


def _ampere(rows: _Table) -> _Table:
    """Two steps in one instruction, whose fragments do not fit beside 64 x 96 accumulators."""
    others: dict[Shape, Shape] = {"wide": "narrow", "short": "small"}
    return {
        (shape, lines): ampere_row(rows[others.get(shape, shape), lines], Moves(2, 1, 2))
        for shape, lines in rows
    }


FORWARDS = {75: _TURING_FORWARD, 80: _ampere(_TURING_FORWARD)}
PRODUCTS = {75: _TURING_PRODUCT, 80: _ampere(_TURING_PRODUCT)}
"""By architecture, then by the tile and the directions of the operands' lines."""


def shapes_for(vec: int, out_vec: int, lines: Lines) -> tuple[Shape, ...]:
    """Return the tiles for arrays that are read `vec` and written `out_vec` items at a time.

    Single items take registers that the largest tiles do not have: they would spill.
    """
    if vec == 1:
        return ("narrow",)
    fitting: tuple[Shape, ...] = ("narrow", "small", "short")
    return fitting if out_vec == 1 and not lines.b else ("wide", *fitting)


def lines_macro(along: bool) -> str:
    """Return what the sources call a direction of lines."""
    return "kAlong" if along else "kAcross"


def specialise_tile(
    kernel: KernelSpec, row: ProductConfig, vec: int, out_vec: int, **macros: Any
) -> Specialisation:
    """Specialise a kernel that includes config.cuh: the macros of a row, and the kernel's own."""
    return kernel.specialise(
        threads=row.threads,
        shared_bytes=row.shared_bytes,
        # ptxas orders parts of a sum, and what an activation adds, otherwise.
        gates=Gates(row.models, scalar=0.48, options=row.models - 0.12),
        TILE_ROWS=row.tile_rows,
        TILE_COLUMNS=row.tile_columns,
        TILE_INNER=row.tile_inner,
        WARP_ROWS=row.warp_rows,
        WARP_COLUMNS=row.warp_columns,
        MIN_CTAS=row.ctas_per_sm,
        VEC=vec,
        OUT_VEC=out_vec,
        MMA_K=row.mma_k,
        A_SETS=row.a_sets,
        A_SLOT=row.a_moves.slot,
        A_STEP=row.a_moves.step,
        A_RING=row.a_moves.ring,
        B_SLOT=row.b_moves.slot,
        B_STEP=row.b_moves.step,
        B_RING=row.b_moves.ring,
        **macros,
    )
