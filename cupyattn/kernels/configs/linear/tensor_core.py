"""Launch configurations of products on tensor cores, for many rows of float16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for
from cupyattn.kernels.spec import KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.kernels.structs import PREACTIVATION_GRADIENT_STRUCT, PRODUCT_STRUCT

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
PRODUCT = KernelSpec(
    "linear_product",
    "linear/tensor_core/product.cu",
    (
        *inputs("a", "b"),
        *inputs("addend", optional=True),
        *(Pointer(name, optional=True) for name in ("partials", "result")),
        PRODUCT_STRUCT,
    ),
)
SPLIT_SUMS = KernelSpec(
    "linear_split_sums",
    "linear/tensor_core/split_sums.cu",
    (
        *inputs("partials"),
        *inputs("b", "addend", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("result"),
        *(Scalar(name, np.dtype(np.int64)) for name in ("rows", "columns", "parts")),
        *(
            Scalar(f"{name}_stride", np.dtype(np.int64))
            for name in ("addend", "preactivation", "result")
        ),
    ),
)
PREACTIVATION_GRADIENT = KernelSpec(
    "linear_preactivation_gradient",
    "linear/tensor_core/preactivation_gradient.cu",
    (
        *inputs("dout"),
        *inputs("preactivation", optional=True),
        *(Pointer(name, optional=True) for name in ("dz", "partials")),
        PREACTIVATION_GRADIENT_STRUCT,
    ),
)
KERNELS = (FORWARD, PRODUCT, SPLIT_SUMS, PREACTIVATION_GRADIENT)

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


Shape = Literal["wide", "narrow", "small", "short"]
"""Of a tile: the fastest; for results that would leave much of its columns empty; for small
results; for short sums, whose stores pass under the products of another CTA."""

_ALONG, _B_ACROSS, _ACROSS = Lines(True, True), Lines(True, False), Lines(False, False)

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
    ("wide", _ALONG): ProductConfig(
        *_WIDE, Moves(3, 2, 2), Moves(1, 3, 2), 1, 0.976, "shared memory is busy for 0.71 of it"
    ),
    ("wide", _B_ACROSS): ProductConfig(
        *_WIDE, Moves(3, 1, 2), Moves(1, 5, 2), 1, 0.956, "the same"
    ),
    ("narrow", _ALONG): ProductConfig(
        *_NARROW, Moves(3, 1, 4), Moves(2, 1, 2), 1, 0.917, "shared memory is busy for 0.88 of it"
    ),
    ("narrow", _B_ACROSS): ProductConfig(
        *_NARROW, Moves(2, 1, 3), Moves(1, 4, 2), 1, 0.915, "the same"
    ),
    ("small", _ALONG): ProductConfig(
        *_SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.932, "shared memory is busy all the time"
    ),
    ("small", _B_ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.891, "the same"
    ),
    ("short", _ALONG): ProductConfig(
        *_SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.952, "shared memory is busy for 0.83 of it"
    ),
    ("short", _B_ACROSS): ProductConfig(
        *_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.955, "the same"
    ),
}
_TURING_PRODUCT: _Table = {
    ("wide", _ALONG): ProductConfig(
        *_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.938, "shared memory is busy for 0.71 of it"
    ),
    ("wide", _B_ACROSS): ProductConfig(
        *_WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.915, "the same"
    ),
    ("wide", _ACROSS): ProductConfig(*_WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.943, "the same"),
    ("narrow", _ALONG): ProductConfig(
        *_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.87, "shared memory is busy for 0.88 of it"
    ),
    ("narrow", _B_ACROSS): ProductConfig(
        *_NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.88, "the same"
    ),
    ("narrow", _ACROSS): ProductConfig(
        *_NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.917, "the same"
    ),
    ("small", _ALONG): ProductConfig(
        *_SMALL, Moves(4, 2, 4), Moves(5, 1, 4), 1, 0.828, "shared memory is busy all the time"
    ),
    ("small", _B_ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.89, "the same"
    ),
    ("small", _ACROSS): ProductConfig(
        *_SMALL, Moves(10, 1, 4), Moves(1, 4, 2), 2, 0.906, "the same"
    ),
    ("short", _ALONG): ProductConfig(
        *_SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.867, "shared memory is busy for 0.83 of it"
    ),
    ("short", _B_ACROSS): ProductConfig(
        *_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.936, "the same"
    ),
    ("short", _ACROSS): ProductConfig(
        *_SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.939, "the same"
    ),
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


def row_of(kernel: KernelSpec, arch: int, shape: Shape, lines: Lines) -> ProductConfig:
    """Return the table row of the forward or of a product of the backward."""
    return rows_for(FORWARDS if kernel is FORWARD else PRODUCTS, arch)[shape, lines]


def shapes_for(vec: int, out_vec: int, lines: Lines) -> tuple[Shape, ...]:
    """Return the tiles for arrays that are read `vec` and written `out_vec` items at a time.

    Single items take registers that the largest tiles do not have: they would spill.
    """
    if vec == 1:
        return ("narrow",)
    fitting: tuple[Shape, ...] = ("narrow", "small", "short")
    return fitting if out_vec == 1 and not lines.b else ("wide", *fitting)


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
    return specialise_tile(
        FORWARD,
        row_of(FORWARD, arch, shape, Lines(True, w_along)),
        vec,
        out_vec,
        W_LINES=lines_macro(w_along),
        ACTIVATION=ACTIVATIONS[activation],
        PAIRED=cpp_bool(paired),
    )


@cache
def product(
    arch: int, shape: Shape, lines: Lines, vec: int, out_vec: int, *, split: bool = False
) -> Specialisation:
    """Specialise a product of the backward; with `split` CTAs share tiles of the result."""
    return specialise_tile(
        PRODUCT,
        row_of(PRODUCT, arch, shape, lines),
        vec,
        out_vec,
        A_LINES=lines_macro(lines.a),
        B_LINES=lines_macro(lines.b),
        SPLIT=cpp_bool(split),
    )


def lines_macro(along: bool) -> str:
    """Return what the sources call a direction of lines."""
    return "kAlong" if along else "kAcross"


_THREADS = 256  # of the kernels below


SPLIT_VEC = 4
"""Columns of a thread that adds parts: 16 bytes of each."""


@cache
def split_sums(vec: int, activation: str | None = None, *, paired: bool = False) -> Specialisation:
    """Specialise the kernel that adds the parts of a product; `vec` columns a thread, 4 or 1."""
    return SPLIT_SUMS.specialise(
        threads=_THREADS, ACTIVATION=ACTIVATIONS[activation], PAIRED=cpp_bool(paired), VEC=vec
    )


@cache
def preactivation_gradient(vec: int, activation: str | None, *, paired: bool) -> Specialisation:
    """Specialise the kernel that forms dz and its sums; `vec` columns a thread."""
    halves = 2 if paired else 1
    stride = WARP_SIZE if vec == 1 else WARP_SIZE + WARP_SIZE // vec  # kSumStride
    return PREACTIVATION_GRADIENT.specialise(
        threads=_THREADS,
        static_shared_bytes=_THREADS // WARP_SIZE * halves * vec * stride * FLOAT_BYTES,
        ACTIVATION=ACTIVATIONS[activation],
        PAIRED=cpp_bool(paired),
        VEC=vec,
    )


def specialise_tile(
    kernel: KernelSpec, row: ProductConfig, vec: int, out_vec: int, **macros: Any
) -> Specialisation:
    """Specialise a kernel that includes config.cuh: the macros of a row, and the kernel's own."""
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
    """Yield every row, with vector and scalar accesses; activations in pairs with the layouts."""
    vec = vector_items("float16")
    for shape, lines in rows_for(FORWARDS, arch):
        yield forward(arch, shape, vec, vec, w_along=lines.b)
    for activation, paired, w_along in pairs(ACTIVATIONS, (False, True), (False, True)):
        if activation:
            yield forward(
                arch, "wide", vec, vec, w_along=w_along, activation=activation, paired=paired
            )
    for w_along in (False, True):
        yield forward(arch, "narrow", 1, 1, w_along=w_along)
    for shape, lines in rows_for(PRODUCTS, arch):
        yield product(arch, shape, lines, vec, vec)
    for lines in (_ALONG, _B_ACROSS, _ACROSS):
        yield product(arch, "narrow", lines, 1, 1)
    yield product(arch, "wide", _ACROSS, vec, vec, split=True)
    yield product(arch, "small", _ALONG, vec, vec, split=True)
    for activation, paired in pairs(ACTIVATIONS, (False, True)):
        if activation or not paired:
            for items in (1, SPLIT_VEC):
                yield split_sums(items, activation, paired=paired)
            for items in (1, vec):
                yield preactivation_gradient(items, activation, paired=paired)
