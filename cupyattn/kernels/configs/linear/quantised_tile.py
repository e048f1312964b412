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

_NARROW = (256, 128, 32, 64, 64, 1)
_SMALL = (128, 128, 32, 64, 64, 2)

_Table = Mapping[tuple[Shape, bool], ProductConfig]

_A, _B = Moves(2, 1, 4), Moves(5, 4, 1)
_TURING: Mapping[str, _Table] = {
    name: {
        ("narrow", True): ProductConfig(*_NARROW, _A, _B, 1, 0.9, ""),
        ("narrow", False): ProductConfig(*_NARROW, _A, _B, 1, 0.9, ""),
        ("small", True): ProductConfig(*_SMALL, _A, Moves(5, 1, 2), 1, 0.8, ""),
        ("small", False): ProductConfig(*_SMALL, _A, Moves(5, 1, 2), 1, 0.8, ""),
    }
    for name in FORMATS
}
PRODUCTS = {
    75: _TURING,
    80: {
        name: {key: ampere_row(row, Moves(1, 2, 1)) for key, row in rows.items()}
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
    """Yield every row, with vector and scalar accesses; activations in pairs with the formats."""
    vec = vector_items("float16")
    for name in FORMATS:
        for shape, along in rows_for(PRODUCTS, arch)[name]:
            if along:
                yield forward(arch, name, shape, vec, vec)
            yield product(arch, name, shape, vec, vec, along=along)
    for name, activation, paired in pairs(FORMATS, ACTIVATIONS, (False, True)):
        if activation:
            yield forward(arch, name, "narrow", vec, vec, activation=activation, paired=paired)
    for name, along in pairs(FORMATS, (False, True)):
        yield product(arch, name, "narrow", 1, 1, along=along)
        yield product(arch, name, "small", vec, vec, along=along, split=True)
