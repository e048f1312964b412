"""Launch configurations of products on tensor cores, for many rows of float16."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.ops.linear.kernels_tiles import (
    ACROSS,
    ALONG,
    B_ACROSS,
    FORWARDS,
    PRODUCTS,
    Lines,
    ProductConfig,
    Shape,
    lines_macro,
    specialise_tile,
)
from cupyattn.ops.linear.structs import PREACTIVATION_GRADIENT_STRUCT, PRODUCT_STRUCT
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import Gates, KernelSpec, Pointer, Scalar, Specialisation, inputs
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

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
"""The structs of common/activations.cuh."""


def row_of(kernel: KernelSpec, arch: int, shape: Shape, lines: Lines) -> ProductConfig:
    """Return the table row of the forward or of a product of the backward."""
    return rows_for(FORWARDS if kernel is FORWARD else PRODUCTS, arch)[shape, lines]


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
        gates=Gates(registers=80),
        ACTIVATION=ACTIVATIONS[activation],
        PAIRED=cpp_bool(paired),
        VEC=vec,
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
    for lines in (ALONG, B_ACROSS, ACROSS):
        yield product(arch, "narrow", lines, 1, 1)
    yield product(arch, "wide", ACROSS, vec, vec, split=True)
    yield product(arch, "small", ALONG, vec, vec, split=True)
    for activation, paired in pairs(ACTIVATIONS, (False, True)):
        if activation or not paired:
            for items in (1, SPLIT_VEC):
                yield split_sums(items, activation, paired=paired)
            for items in (1, vec):
                yield preactivation_gradient(items, activation, paired=paired)
