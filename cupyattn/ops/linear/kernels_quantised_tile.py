"""Launch configurations of products with a quantised weight on tensor cores, for many rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from cupyattn.ops.linear.kernels_quantised import FORMATS
from cupyattn.ops.linear.kernels_tensor_core import ACTIVATIONS
from cupyattn.ops.linear.kernels_tiles import (
    Moves,
    ProductConfig,
    Shape,
    ampere_row,
    lines_macro,
    specialise_tile,
)
from cupyattn.ops.linear.structs import QUANTISED_TILE_STRUCT
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

WEIGHT = (*inputs("codes", "scales"), *inputs("super_scales", optional=True))

FORWARD = KernelSpec(
    "linear_forward_quantised",
    "linear/quantised/tile_forward.cu",
    (
        *inputs("x"),
        *WEIGHT,
        *inputs("b", "residual", optional=True),
        Pointer("preactivation", optional=True),
        Pointer("out"),
        QUANTISED_TILE_STRUCT,
    ),
)
PRODUCT = KernelSpec(
    "linear_product_quantised",
    "linear/quantised/tile_product.cu",
    (
        *inputs("a"),
        *WEIGHT,
        *inputs("addend", optional=True),
        *(Pointer(name, optional=True) for name in ("partials", "result")),
        QUANTISED_TILE_STRUCT,
    ),
)
KERNELS = (FORWARD, PRODUCT)

_Table = Mapping[tuple[Shape, bool], ProductConfig]
_Slots = tuple[Moves, Moves, int, float]
"""Of A and of B, the sets of A's fragments, and the tensor utilisation of the main loop on a T4."""


def _rows(
    narrow: _Slots,
    narrow_across: _Slots,
    small: _Slots,
    small_across: _Slots,
    few: _Slots,
    few_across: _Slots,
) -> _Table:
    """Return the rows of a format: by the tile, and whether rows of codes lie along the sum."""
    of_256, of_128, of_64 = (
        (256, 128, 32, 64, 64, 1),
        (128, 128, 32, 64, 64, 2),
        (_FEW, 128, 32, 32, 64, 2),
    )
    return {
        ("narrow", True): ProductConfig(
            *of_256, *narrow, "192 columns leave no registers for codes"
        ),
        ("narrow", False): ProductConfig(*of_256, *narrow_across, "the same"),
        ("small", True): ProductConfig(*of_128, *small, "for small results; two CTAs take turns"),
        ("small", False): ProductConfig(*of_128, *small_across, "the same"),
        ("few", True): ProductConfig(*of_64, *few, "for few rows; shared memory binds"),
        ("few", False): ProductConfig(*of_64, *few_across, "the same"),
    }


_FEW = 64  # rows of the smallest tile

# The utilisation is by the static model, as in tensor_core.py (NVRTC 12.9.86, 2026-11-23, +-0.05),
# and so are the slots: the best of 25 to 80 that were tried of each, between 0.73 and 0.94. Shared
# memory is busy for 0.84 of the loop in the first two rows, for 0.93 in the next two. That the loop
# is that of float16, with codes decoded between a load and a store, costs nothing by the model:
# rows of float16 of these tiles have 0.83 to 0.93. Where rows of codes lie along the sum the slots
# are the forward's; parts of a sum (PRODUCT, `split`), which ptxas orders otherwise, have 0.75 to
# 0.87 with them, and those of the last two rows 0.65 to 0.72. These two keep shared memory busy all
# the time; but of 64 rows the tile before would waste half of its products. No GPU has timed them.
#
# GeForce cards take twice as long for a product, and their rows have 0.89 to 0.98 (`turing
# --machine "RTX 2060 Super" --kernel linear_forward_quantised linear_product_quantised`). With the
# slots of any other row of the tile none has 0.05 more there (2026-11-24): one had, of "q4_k" and
# few rows, and has them now, which are no worse on a T4.
_TURING: Mapping[str, _Table] = {
    "nf4": _rows(
        # The model's best, (3, 1, 4), (6, 6, 1) with 0.919, is 2 to 9 % slower on an H200 as
        # compute_75 code but for one size (2026-11-23, in a sweep that is not kept).
        (Moves(5, 1, 4), Moves(4, 4, 1), 1, 0.906),
        # dx on an H200 as compute_75 code (NVRTC 13.0, 2026-11-23, means of two medians of 8
        # calls, in a sweep that is not kept): 281, 286 and 294 TFLOP/s at M x N x K of the forward
        # 8192 x 8192 x 4096, 8192 x 16384 x 4096 and 8192 x 2560 x 10240. (7, 1, 3), (5, 8, 1)
        # with one set of A's fragments and 0.925 makes 249, 252 and 280: an H200 waits for the
        # piece of A that is asked for three slots before it is stored.
        (Moves(5, 1, 4), Moves(11, 1, 1), 2, 0.913),
        (Moves(8, 1, 4), Moves(0, 2, 2), 1, 0.905),
        (Moves(10, 1, 4), Moves(1, 2, 2), 1, 0.893),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.713),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.723),
    ),
    "int4": _rows(
        (Moves(4, 1, 4), Moves(11, 2, 1), 1, 0.932),
        # dx there: 288, 292 and 310. (8, 1, 3), (3, 10, 1), one set, 0.922: 239, 241 and 281.
        (Moves(2, 3, 4), Moves(3, 8, 1), 2, 0.912),
        (Moves(8, 1, 4), Moves(0, 3, 2), 1, 0.870),
        (Moves(10, 1, 3), Moves(3, 2, 2), 1, 0.856),
        (Moves(5, 1, 2), Moves(6, 0, 2), 2, 0.736),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.698),
    ),
    "int8": _rows(
        (Moves(2, 3, 3), Moves(7, 2, 1), 1, 0.943),
        (Moves(8, 1, 3), Moves(2, 4, 1), 1, 0.903),
        (Moves(8, 1, 4), Moves(2, 2, 2), 1, 0.903),
        (Moves(10, 1, 3), Moves(1, 2, 2), 1, 0.880),
        (Moves(3, 1, 2), Moves(3, 1, 2), 2, 0.703),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.677),
    ),
    "q4_1": _rows(
        (Moves(1, 1, 3), Moves(5, 6, 1), 1, 0.925),
        (Moves(8, 1, 3), Moves(2, 4, 1), 1, 0.907),
        (Moves(8, 1, 4), Moves(0, 2, 2), 1, 0.901),
        (Moves(6, 2, 4), Moves(4, 3, 2), 1, 0.864),
        (Moves(2, 1, 2), Moves(3, 1, 2), 2, 0.714),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.730),
    ),
    "q4_k": _rows(
        (Moves(3, 1, 4), Moves(6, 6, 1), 1, 0.907),
        (Moves(8, 1, 3), Moves(3, 10, 1), 1, 0.916),
        (Moves(8, 1, 4), Moves(0, 3, 2), 1, 0.861),
        (Moves(10, 1, 4), Moves(1, 2, 2), 1, 0.862),
        (Moves(2, 1, 2), Moves(3, 1, 2), 2, 0.699),
        (Moves(5, 1, 2), Moves(3, 1, 2), 2, 0.711),
    ),
}


def _ampere(row: ProductConfig) -> ProductConfig:
    """Return a row with two steps in one instruction: of few rows 3 slots are left."""
    if row.tile_rows > _FEW:
        return ampere_row(row, Moves(1, 1, 1))
    return replace(ampere_row(row, Moves(1, 0, 2)), a_moves=Moves(0, 1, 2))


PRODUCTS = {
    75: _TURING,
    80: {name: {key: _ampere(row) for key, row in rows.items()} for name, rows in _TURING.items()},
}
"""By architecture, by format, then by tile and whether rows of codes lie along the sum."""


def row_of(arch: int, name: str, shape: Shape, along: bool) -> ProductConfig:
    """Return the table row of a format and a tile."""
    return rows_for(PRODUCTS, arch)[name][shape, along]


def shapes_for(vec: int) -> tuple[Shape, ...]:
    """Return the tiles for an x that is read `vec` items at a time."""
    return ("narrow",) if vec == 1 else ("narrow", "small", "few")


@cache
def forward(
    arch: int,
    name: str,
    shape: Shape,
    vec: int,
    out_vec: int,
    *,
    activation: str | None = None,
    paired: bool = False,
) -> Specialisation:
    """Specialise the forward of a format, whose rows of codes lie along the sum."""
    return specialise_tile(
        FORWARD,
        row_of(arch, name, shape, True),
        vec,
        out_vec,
        FORMAT=FORMATS[name],
        ACTIVATION=ACTIVATIONS[activation],
        PAIRED=cpp_bool(paired),
    )


@cache
def product(
    arch: int, name: str, shape: Shape, vec: int, out_vec: int, *, along: bool, split: bool = False
) -> Specialisation:
    """Specialise a product without anything behind it; with `split` CTAs share its tiles."""
    return specialise_tile(
        PRODUCT,
        row_of(arch, name, shape, along),
        vec,
        out_vec,
        FORMAT=FORMATS[name],
        B_LINES=lines_macro(along),
        SPLIT=cpp_bool(split),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row, its parts of a sum, an activation with each format, and scalar accesses."""
    vec = vector_items("float16")
    for name in FORMATS:
        for shape, along in rows_for(PRODUCTS, arch)[name]:
            if along:
                yield forward(arch, name, shape, vec, vec)
            else:
                yield product(arch, name, shape, vec, vec, along=along)
    kinds = (("gelu", False), ("silu", True), ("relu", False), ("gelu_tanh", False), ("gelu", True))
    for name, (activation, paired) in zip(FORMATS, kinds, strict=True):
        yield forward(arch, name, "narrow", vec, vec, activation=activation, paired=paired)
    for name, along in pairs(FORMATS, (False, True)):
        yield product(arch, name, "small", vec, vec, along=along, split=True)
        yield product(arch, name, "few", vec, vec, along=along, split=True)
    yield forward(arch, "nf4", "narrow", 1, 1)
    for along in (False, True):
        yield product(arch, "nf4", "narrow", 1, 1, along=along)
