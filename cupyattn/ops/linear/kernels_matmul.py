"""Products of batches of matrices: kernels and configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from cupyattn.ops.linear.kernels_float32 import (
    DTYPES,
    FLOAT_PRODUCT_PARAMS,
    FLOAT_PRODUCT_STRUCT,
    OUT_VECTOR,
    FloatTileConfig,
    float_tile,
)
from cupyattn.ops.linear.kernels_tensor_core import (
    ACROSS,
    ALONG,
    B_ACROSS,
)
from cupyattn.ops.linear.native_tiles import (
    NATIVE_TILES,
    native_config,
    native_rows,
)
from cupyattn.ops.linear.tiles import (
    NARROW,
    PRODUCT_PARAMS,
    PRODUCT_STRUCT,
    SHORT,
    SMALL,
    VECTOR,
    WIDE,
    Lines,
    Moves,
    Shape,
    TileConfig,
    lines_macro,
    single_config,
    specialise_tile,
)
from cupyattn.runtime.arch import TURING
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.spec import (
    KernelSpec,
    Pointer,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.tables import cpp_bool, pairs, rows_for

BATCH_AXES = 4
"""Batch axes that kernels support, after merging (kBatchAxes in batch.cuh)."""

_DIVISOR = np.dtype([(name, np.uint32) for name in ("divisor", "multiplier", "shift")])
# BatchParams in cuda_src/linear/batched/batch.cuh
BATCH_PARAMS = np.dtype(
    [
        ("strides", np.int64, (BATCH_AXES, 3)),
        ("extents", _DIVISOR, (BATCH_AXES,)),
        ("ctas", _DIVISOR),
    ],
    align=True,
)
BATCH_STRUCT = StructParameter("batch", BATCH_PARAMS, "BatchParams")


def _batched(product: np.dtype, *more: tuple[str, type]) -> np.dtype:
    strides = [(f"{operand}_item_stride", np.int64) for operand in ("a", "b")]
    return np.dtype([("product", product), ("batch", BATCH_PARAMS), *strides, *more], align=True)


# BatchedProductParams in cuda_src/linear/batched/product.cu
BATCHED_PRODUCT_PARAMS = _batched(PRODUCT_PARAMS)
# BatchedIntegerParams in cuda_src/linear/batched/product_s8.cu
BATCHED_INTEGER_PARAMS = _batched(PRODUCT_PARAMS, ("odd", np.int64))
# BatchedFloatParams in cuda_src/linear/batched/product_f32.cu
BATCHED_FLOAT_PARAMS = _batched(FLOAT_PRODUCT_PARAMS)

_ARRAYS = (*inputs("a", "b"), Pointer("out"))
TENSOR_CORE = KernelSpec(
    "matmul",
    "linear/batched/product.cu",
    (
        *_ARRAYS,
        StructParameter(
            "params",
            BATCHED_PRODUCT_PARAMS,
            "BatchedProductParams",
            includes=(PRODUCT_STRUCT, BATCH_STRUCT),
        ),
    ),
)
FLOAT32 = KernelSpec(
    "matmul_f32",
    "linear/batched/product_f32.cu",
    (
        *_ARRAYS,
        StructParameter(
            "params",
            BATCHED_FLOAT_PARAMS,
            "BatchedFloatParams",
            includes=(FLOAT_PRODUCT_STRUCT, BATCH_STRUCT),
        ),
    ),
)
INT8 = KernelSpec(
    "matmul_s8",
    "linear/batched/product_s8.cu",
    (
        *_ARRAYS,
        StructParameter(
            "params",
            BATCHED_INTEGER_PARAMS,
            "BatchedIntegerParams",
            includes=(PRODUCT_STRUCT, BATCH_STRUCT),
        ),
    ),
)
KERNELS = (TENSOR_CORE, FLOAT32, INT8)


# --- configurations

A_ACROSS = Lines(False, True)
_TINY = (64, 64, 32, 32, 32, 4)
_SKINNY = (32, 128, 32, 32, 32, 3)

_Table = Mapping[tuple[Shape, Lines], TileConfig]

# Slots are those of linear's products, except of "small": batches of small products read their
# operands from DRAM, so it has all of a k-tile in flight. At a global latency of 900 cycles it
# models 0.88 to 0.93; linear's slots with half of B in flight model 0.73. "Wide" with A across has
# slots that model 0.91 under load, for 0.84. `models` is by the model of a T4 (NVRTC 12.9.86,
# 2026-11-28, +-0.05), at 330 cycles: no Turing GPU has been measured.
_TURING: _Table = {
    ("wide", ALONG): TileConfig(*WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.928, loaded=0.88),
    ("wide", B_ACROSS): TileConfig(*WIDE, Moves(4, 1, 2), Moves(11, 2, 3), 1, 0.931),
    ("wide", ACROSS): TileConfig(*WIDE, Moves(4, 1, 2), Moves(3, 3, 2), 1, 0.912, loaded=0.84),
    ("wide", A_ACROSS): TileConfig(*WIDE, Moves(8, 2, 2), Moves(9, 3, 2), 1, 0.935),
    ("narrow", ALONG): TileConfig(*NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.87),
    ("narrow", B_ACROSS): TileConfig(*NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.88),
    ("narrow", ACROSS): TileConfig(*NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.917, loaded=0.88),
    ("narrow", A_ACROSS): TileConfig(*NARROW, Moves(7, 1, 4), Moves(2, 5, 1), 1, 0.884),
    ("small", ALONG): TileConfig(*SMALL, Moves(9, 1, 4), Moves(10, 1, 4), 1, 0.879),
    ("small", B_ACROSS): TileConfig(*SMALL, Moves(9, 1, 4), Moves(6, 1, 4), 2, 0.918),
    ("small", ACROSS): TileConfig(*SMALL, Moves(6, 1, 4), Moves(9, 1, 4), 2, 0.94),
    ("small", A_ACROSS): TileConfig(*SMALL, Moves(9, 1, 4), Moves(7, 2, 4), 2, 0.914, loaded=0.87),
    ("short", ALONG): TileConfig(*SHORT, Moves(1, 3, 1), Moves(2, 2, 2), 1, 0.892, loaded=0.86),
    ("short", B_ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.936, loaded=0.87),
    ("short", ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.939, loaded=0.87),
    ("short", A_ACROSS): TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.932, loaded=0.89),
    **{
        ("tiny", lines): TileConfig(*_TINY, Moves(0, 1, 2), Moves(1, 1, 2), 2, 0.5)
        for lines in (ALONG, B_ACROSS, ACROSS, A_ACROSS)
    },
    # A tile across the sum has at least 64 rows.
    **{
        ("skinny", lines): TileConfig(*_SKINNY, Moves(0, 1, 1), Moves(0, 1, 4), 2, 0.444)
        for lines in (ALONG, B_ACROSS)
    },
}


def _with_small_tiles(rows: _Table) -> _Table:
    """Return native configurations, and those of the smallest results and of few rows."""
    why = "for the smallest results; four CTAs alternate"
    tiny = native_config((64, 64, 32, 32, 32, 4), 3, 0.5, why)
    skinny = native_config((32, 128, 32, 32, 32, 3), 3, 0.45, "for results of few rows")
    directions = (ALONG, B_ACROSS, ACROSS, A_ACROSS)
    return {
        **rows,
        **{("tiny", lines): tiny for lines in directions},
        **{("skinny", lines): skinny for lines in directions if lines.a},
    }


_NATIVE = {
    arch: _with_small_tiles(rows)
    for arch, rows in native_rows(_TURING).items()
    if arch >= NATIVE_ARCH
}
CONFIGURATIONS = {75: _TURING, **_NATIVE}
"""Configurations by architecture, then by the tile and the directions of the operands' lines."""


def config_of(arch: int, shape: Shape, lines: Lines, vec: int) -> TileConfig:
    """Return the configuration on tensor cores for arrays that are loaded `vec` items at a time."""
    if vec == 1:
        return single_config(arch, _TURING[shape, lines], Moves(2, 1, 2))
    return rows_for(CONFIGURATIONS, arch)[shape, lines]


PAIRS, TRANSPOSING, ITEMS = "PairLoader", "TransposingLoader", "ItemLoader"
"""Loaders of int8 (product_s8.cu): contiguous along the sum, across it, and of any strides."""

INT8_TILES: Mapping[Shape, TileConfig] = {
    "wide": TileConfig(*WIDE, Moves(8, 3, 2), Moves(3, 5, 2), 1, 0.94),
    "narrow": TileConfig(*NARROW, Moves(5, 1, 4), Moves(10, 1, 2), 1, 0.906),
    "small": TileConfig(*SMALL, Moves(5, 2, 4), Moves(7, 2, 2), 2, 0.89),
    "short": TileConfig(*SHORT, Moves(1, 5, 1), Moves(0, 1, 2), 1, 0.951, loaded=0.87),
    "tiny": TileConfig(*_TINY, Moves(0, 1, 2), Moves(1, 1, 2), 2, 0.5),
    "skinny": TileConfig(*_SKINNY, Moves(0, 1, 1), Moves(0, 1, 4), 2, 0.444),
}
"""Configurations of int8 on Turing, both of whose operands are contiguous along the sum."""
_INT8: Mapping[int, Mapping[Shape, TileConfig]] = {
    75: INT8_TILES,
    **{
        arch: {shape: row for (shape, lines), row in rows.items() if lines == ALONG}
        for arch, rows in _NATIVE.items()
    },
}

_INT8_TRANSPOSED = {(PAIRS, TRANSPOSING): 0.822, (TRANSPOSING, PAIRS): 0.788}
_INT8_TRANSPOSED[TRANSPOSING, TRANSPOSING] = 0.817
_INT8_TRANSPOSED_LOADED = 0.68
_INT8_ITEMS = 0.16
"""Utilisation of the integer tensor cores for other pairs of loaders, in the tile "small"."""


_RINGS = {PAIRS: 4, TRANSPOSING: 1, ITEMS: 2}
"""Loads in flight by loader. A load of transposed words takes 16 registers, others 4."""


def int8_shapes(arch: int, loaders: tuple[str, str]) -> tuple[Shape, ...]:
    """Return the tiles of int8 to choose from."""
    return tuple(rows_for(_INT8, arch)) if loaders == (PAIRS, PAIRS) else ("small",)


def int8_config(arch: int, shape: Shape, loaders: tuple[str, str]) -> TileConfig:
    """Return the configuration of a tile."""
    if loaders == (PAIRS, PAIRS):
        return rows_for(_INT8, arch)[shape]
    config = INT8_TILES[shape]
    a_moves, b_moves = config.a_moves, config.b_moves
    a_ring, b_ring = (_RINGS[loader] for loader in loaders)
    newer = "k-tiles pass registers: cp.async copies whole aligned vectors along the sum"
    return replace(
        config,
        a_moves=a_moves._replace(ring=min(a_ring, a_moves.ring)),
        b_moves=b_moves._replace(ring=min(b_ring, b_moves.ring)),
        models=_INT8_TRANSPOSED.get(loaders, _INT8_ITEMS),
        loaded=_INT8_TRANSPOSED_LOADED if loaders in _INT8_TRANSPOSED else None,
        why=newer if arch >= NATIVE_ARCH else None,
    )


@cache
def int8(
    arch: int,
    shape: Shape,
    loaders: tuple[str, str],
    out_vec: int,
    *,
    tensor_cores: bool = True,
) -> Specialisation:
    """Specialise the kernel of int8; `out_vec` is 8 if rows of out have whole aligned pairs.

    Without tensor cores four products and their sum are one instruction, whose operands are
    shuffled: the gates have no utilisation.
    """
    a_loader, b_loader = loaders
    config = int8_config(arch if tensor_cores else TURING.number, shape, loaders)
    return specialise_tile(
        INT8,
        config if tensor_cores else replace(config, models=0.0, loaded=None),
        VECTOR,
        out_vec,
        scalar=0.48 if tensor_cores else 0.0,
        A_LOADER=a_loader,
        B_LOADER=b_loader,
        DOT_PRODUCTS=cpp_bool(not tensor_cores),
    )


def shapes_for(arch: int, vec: int, out_vec: int, lines: Lines) -> tuple[Shape, ...]:
    """Return the tiles for arrays that are loaded `vec` and stored `out_vec` items at a time.

    Single loads need registers for their addresses: the other tiles would spill.
    """
    if vec == 1:
        return ("narrow", "small")
    few: tuple[Shape, ...] = ("skinny",) if lines.a else ()
    if arch >= NATIVE_ARCH:
        return (*rows_for(NATIVE_TILES, arch), "tiny", *few)
    fitting: tuple[Shape, ...] = ("narrow", "small", "short", "tiny", *few)
    return fitting if out_vec == 1 and not lines.b else ("wide", *fitting)


@cache
def tensor_core(
    arch: int, shape: Shape, lines: Lines, vec: int, out_vec: int, dtype: str = "float16"
) -> Specialisation:
    """Specialise the kernel on tensor cores."""
    return specialise_tile(
        TENSOR_CORE,
        config_of(arch, shape, lines, vec),
        vec,
        out_vec,
        scalar=0.23,
        DTYPE=dtype,
        A_LINES=lines_macro(lines.a),
        B_LINES=lines_macro(lines.b),
    )


_FLOAT_TILES = (
    FloatTileConfig(128, 64, 3, "168 registers hold the sums and the loads in flight"),
    FloatTileConfig(64, 64, 4, "for few tiles, or results that leave half of a larger one empty"),
)
_FEW_TILES = 80  # as in kernels_float32: two for each multiprocessor of a T4


def float_config(rows: int, columns: int, members: int) -> FloatTileConfig:
    """Return the configuration in float32 arithmetic for so many results of these sizes."""
    large, small = _FLOAT_TILES
    tiles = -(-rows // large.tile_m) * -(-columns // large.tile_n) * members
    fills = -(-rows // large.tile_m) * large.tile_m < rows + large.tile_m // 2
    return large if fills and tiles >= _FEW_TILES else small


@cache
def float32(
    dtype: str, config: FloatTileConfig, a_along: str, b_along: str, vec: int, vec_out: int
) -> Specialisation:
    """Specialise the kernel in float32 arithmetic."""
    return float_tile(
        FLOAT32, dtype, config, A_ALONG=a_along, B_ALONG=b_along, VEC=vec, VEC_OUT=vec_out
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration, with vector and scalar accesses; in float32 in pairs."""
    for shape, lines in rows_for(CONFIGURATIONS, arch):
        yield tensor_core(arch, shape, lines, VECTOR, VECTOR)
    for number, lines in enumerate((ALONG, B_ACROSS, ACROSS, A_ACROSS)):
        yield tensor_core(arch, shapes_for(arch, 1, 1, lines)[number % 2], lines, 1, 1)
    for tile in int8_shapes(arch, (PAIRS, PAIRS)):
        yield int8(arch, tile, (PAIRS, PAIRS), VECTOR)
    for loaders in (*_INT8_TRANSPOSED, (ITEMS, ITEMS), (ITEMS, TRANSPOSING)):
        yield int8(arch, "small", loaders, 1)
    yield int8(arch, "small", (PAIRS, TRANSPOSING), VECTOR, tensor_cores=False)
    along = ("kDepth", "kLines")
    for number, (dtype, a_along, b_along, whole) in enumerate(
        pairs(DTYPES, along, along, (True, False))
    ):
        config, vec = _FLOAT_TILES[number % 2], vector_items(dtype) if whole else 1
        yield float32(dtype, config, a_along, b_along, vec, (OUT_VECTOR, 1)[number // 2 % 2])
