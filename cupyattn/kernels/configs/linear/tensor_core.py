"""Launch configurations of products on tensor cores, for many rows of float16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.tables import cpp_bool, pairs, rows_for
from cupyattn.kernels.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.kernels.structs import PRODUCT_STRUCT

FORWARD = KernelSpec(
    "linear_forward",
    "linear/tensor_core/forward.cu",
    (
        *inputs("x", "w"),
        *inputs("b", "residual", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("out"),
        PRODUCT_STRUCT,
    ),
)
KERNELS = (FORWARD,)

ACTIVATIONS = {
    None: "Identity",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
    "relu": "Relu",
}
"""The structs of activation.cuh."""


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


Shape = Literal["wide", "narrow", "small"]
"""Of a tile: the fastest; for results that would leave much of its columns empty; for results that
are few of either."""

_ALONG, _B_ACROSS, _ACROSS = Lines(True, True), Lines(True, False), Lines(False, False)

_WIDE = (256, 192, 32, 64, 96, 1)
_NARROW = (256, 128, 32, 64, 64, 1)
_SMALL = (128, 128, 32, 64, 64, 2)

# `models` is by a static model of the machine code (NVRTC 12.9.86, 2026-11-22, +-0.05): no Turing
# card has been measured. The slots are the best of some dozens that were tried: ptxas places loads
# and stores otherwise for each.
_TURING: Mapping[tuple[Shape, Lines], ProductConfig] = {
    ("wide", _ALONG): ProductConfig(
        *_WIDE, Moves(2, 2, 2), Moves(0, 1, 3), 2, 0.955, "shared memory is busy for 0.71 of it"
    ),
    ("wide", _B_ACROSS): ProductConfig(
        *_WIDE, Moves(2, 2, 2), Moves(0, 1, 3), 2, 0.885, "the same tile"
    ),
    ("narrow", _ALONG): ProductConfig(
        *_NARROW, Moves(2, 1, 4), Moves(6, 1, 2), 2, 0.81, "the same"
    ),
    ("narrow", _B_ACROSS): ProductConfig(
        *_NARROW, Moves(2, 1, 4), Moves(6, 1, 2), 2, 0.86, "the same"
    ),
    ("small", _ALONG): ProductConfig(*_SMALL, Moves(2, 1, 4), Moves(6, 1, 4), 2, 0.81, "the same"),
    ("small", _B_ACROSS): ProductConfig(
        *_SMALL, Moves(2, 1, 4), Moves(6, 1, 4), 2, 0.77, "the same"
    ),
}

PRODUCTS = {
    75: _TURING,
    80: {
        (shape, lines): replace(_TURING["narrow" if shape == "wide" else shape, lines], mma_k=16)
        for shape, lines in _TURING
    },
}
"""By architecture, then by the tile and the directions of the operands' lines."""


def product_row(arch: int, shape: Shape, lines: Lines) -> ProductConfig:
    """Return the table row."""
    return rows_for(PRODUCTS, arch)[shape, lines]


@cache
def forward(
    arch: int,
    shape: Shape,
    vec: int,
    out_vec: int,
    *,
    w_along: bool,
    activation: str | None = None,
    paired: bool = False,
) -> Specialisation:
    """Specialise the forward.

    Parameters
    ----------
    arch : int
        Number of the architecture.
    shape : Shape
        Of the tile.
    vec, out_vec : int
        Items of a load of x and w, and of an access to results and residual: 8, or 1.
    w_along : bool
        Whether the columns of w are contiguous, otherwise its rows.
    activation : str, optional
        Of the result, or of its gate.
    paired : bool
        Whether w has a gate and what it is multiplied with.
    """
    return _specialise(
        FORWARD,
        product_row(arch, shape, Lines(True, w_along)),
        vec,
        out_vec,
        W_LINES="kAlong" if w_along else "kAcross",
        ACTIVATION=ACTIVATIONS[activation],
        PAIRED=cpp_bool(paired),
    )


def _specialise(
    kernel: KernelSpec, row: ProductConfig, vec: int, out_vec: int, **macros: int | str
) -> Specialisation:
    return kernel.specialise(
        threads=row.threads,
        shared_bytes=row.shared_bytes,
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


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row, with vector and scalar accesses, activations in pairs with the layouts."""
    vec = vector_items("float16")
    for shape, lines in rows_for(PRODUCTS, arch):
        yield forward(arch, shape, vec, vec, w_along=lines.b)
    for activation, paired, w_along in pairs(ACTIVATIONS, (False, True), (False, True)):
        if activation or not paired:
            yield forward(
                arch, "wide", vec, vec, w_along=w_along, activation=activation, paired=paired
            )
    for w_along in (False, True):
        yield forward(arch, "narrow", 1, 1, w_along=w_along)
