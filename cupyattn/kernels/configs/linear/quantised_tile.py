"""Launch configurations of products with a quantised weight on tensor cores, for many rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from cupyattn.kernels.arch import TURING
from cupyattn.kernels.configs.dtypes import vector_items
from cupyattn.kernels.configs.linear.quantised import FORMATS
from cupyattn.kernels.configs.linear.tensor_core import (
    ACTIVATIONS,
    Moves,
    ProductConfig,
    Shape,
    ampere_row,
    lines_macro,
    specialise_tile,
)
from cupyattn.kernels.configs.tables import cpp_bool, pairs, rows_for
from cupyattn.kernels.spec import KernelSpec, Pointer, Specialisation, inputs
from cupyattn.kernels.structs import QUANTISED_TILE_STRUCT

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
_Slots = tuple[Moves, Moves, float]
"""Of A and of B, and the tensor utilisation of the main loop on a T4."""


def _rows(narrow: _Slots, narrow_across: _Slots, small: _Slots, small_across: _Slots) -> _Table:
    """Return the rows of a format: by the tile, and whether rows of codes lie along the sum."""
    wide, few = (256, 128, 32, 64, 64, 1), (128, 128, 32, 64, 64, 2)
    return {
        ("narrow", True): ProductConfig(
            *wide, *narrow[:2], 1, narrow[2], "192 columns leave no registers for codes"
        ),
        ("narrow", False): ProductConfig(
            *wide, *narrow_across[:2], 1, narrow_across[2], "the same"
        ),
        ("small", True): ProductConfig(
            *few, *small[:2], 1, small[2], "for small results; two CTAs take turns"
        ),
        ("small", False): ProductConfig(*few, *small_across[:2], 1, small_across[2], "the same"),
    }


# The utilisation is by the static model, as in tensor_core.py (NVRTC 12.9.86, 2026-11-23, +-0.05),
# and so are the slots: the best of 25 to 80 that were tried of each, between 0.73 and 0.94. Shared
# memory is busy for 0.84 of the loop in the first two rows, for 0.93 in the others. That the loop
# is that of float16, with codes decoded between a load and a store, costs nothing by the model:
# rows of float16 of these tiles have 0.83 to 0.93. Where rows of codes lie along the sum the slots
# are the forward's; parts of a sum (PRODUCT, `split`), which ptxas orders otherwise, have 0.75 to
# 0.87 with them.
_TURING: Mapping[str, _Table] = {
    "nf4": _rows(
        # The model's best, (3, 1, 4), (6, 6, 1) with 0.919, is 2 to 9 % slower on an H200 as
        # compute_75 code but for one size (2026-11-23, in a sweep that is not kept).
        (Moves(5, 1, 4), Moves(4, 4, 1), 0.906),
        (Moves(7, 1, 3), Moves(5, 8, 1), 0.925),
        (Moves(8, 1, 4), Moves(0, 2, 2), 0.905),
        (Moves(10, 1, 4), Moves(1, 2, 2), 0.893),
    ),
    "int4": _rows(
        (Moves(4, 1, 4), Moves(11, 2, 1), 0.932),
        (Moves(8, 1, 3), Moves(3, 10, 1), 0.922),
        (Moves(8, 1, 4), Moves(0, 3, 2), 0.870),
        (Moves(10, 1, 3), Moves(3, 2, 2), 0.856),
    ),
    "int8": _rows(
        (Moves(2, 3, 3), Moves(7, 2, 1), 0.943),
        (Moves(8, 1, 3), Moves(2, 4, 1), 0.903),
        (Moves(8, 1, 4), Moves(2, 2, 2), 0.903),
        (Moves(10, 1, 3), Moves(1, 2, 2), 0.880),
    ),
    "q4_1": _rows(
        (Moves(1, 1, 3), Moves(5, 6, 1), 0.925),
        (Moves(8, 1, 3), Moves(2, 4, 1), 0.907),
        (Moves(8, 1, 4), Moves(0, 2, 2), 0.901),
        (Moves(6, 2, 4), Moves(4, 3, 2), 0.864),
    ),
    "q4_k": _rows(
        (Moves(3, 1, 4), Moves(6, 6, 1), 0.907),
        (Moves(8, 1, 3), Moves(3, 10, 1), 0.916),
        (Moves(8, 1, 4), Moves(0, 3, 2), 0.861),
        (Moves(10, 1, 4), Moves(1, 2, 2), 0.862),
    ),
}
PRODUCTS = {
    75: _TURING,
    80: {
        name: {key: ampere_row(row, Moves(1, 1, 1)) for key, row in rows.items()}
        for name, rows in _TURING.items()
    },
}
"""By architecture, by format, then by tile and whether rows of codes lie along the sum."""


def row_of(arch: int, name: str, shape: Shape, along: bool) -> ProductConfig:
    """Return the table row of a format and a tile."""
    return rows_for(PRODUCTS, arch)[name][shape, along]


def shapes_for(vec: int) -> tuple[Shape, ...]:
    """Return the tiles for an x that is read `vec` items at a time."""
    return ("narrow",) if vec == 1 else ("narrow", "small")


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
    yield forward(arch, "nf4", "narrow", 1, 1)
    for along in (False, True):
        yield product(arch, "nf4", "narrow", 1, 1, along=along)
