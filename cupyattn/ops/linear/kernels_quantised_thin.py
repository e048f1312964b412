"""Launches of products with few rows of x and a quantised weight, on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cupyattn.ops.linear.kernels_float32 import STRUCTS
from cupyattn.ops.linear.kernels_quantised import FORMATS
from cupyattn.ops.linear.kernels_quantised_thin_rows import TABLE, QuantisedThinConfig, kind_of
from cupyattn.ops.linear.kernels_thin import EPILOGUE
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.spec import KernelSpec, Specialisation, inputs
from cupyattn.runtime.storage import VECTOR_BYTES
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, rows_for

PRODUCT = KernelSpec(
    "linear_quantised_thin",
    "linear/quantised/thin.cu",
    (*inputs("x", "codes", "scales"), *inputs("super_scales", optional=True), *EPILOGUE),
)
KERNELS = (PRODUCT,)

MAX_ROWS = 32
"""Of x. Tiles take over: at 64 rows those of 128 are 0.8 to 1.7 times as fast

(an H200 as compute_75 code, 2026-11-23, nf4 and int4 at four sizes, in a sweep that is not kept).
"""
SPAN_BYTES = 64
"""Of a column's codes, which four lanes read."""

_TABLE_BYTES = 32_768  # the codebook's pairs, of "nf4"
_SHARED_BYTES = {"nf4": 49_152}
_OTHERS_SHARED_BYTES = 32_768
"""At most: what a CTA has without asking for more, or half of what an SM of Turing has."""
_TILE = 8  # rows of x
_MOST_GROUPS = 15  # the barriers of a CTA, less that of all its threads
_SPLIT_TURNS = 8
"""Turns of a CTA round its warps, below which a split of K costs more than it saves."""


@dataclass(frozen=True)
class QuantisedThinLaunch:
    """A product's kernel: the row of its table, what was chosen within it, and the grid."""

    config: QuantisedThinConfig
    weights: str
    """The format."""
    block_size: int
    """0 where it is a whole row of "int8"."""
    vec: int
    vec_scales: bool
    parts: int
    """Neighbouring spans of a column that fill a tile of x."""
    x_tiles: int
    """Of eight rows."""
    steps: int
    groups: int
    k_warps: int
    tiles: int
    """Of columns, each a group's work."""
    splits: int
    """Parts of K."""
    ctas: int


def thin_launch(
    arch: int,
    multiprocessors: int,
    weights: str,
    block_size: int,
    vec: int,
    *,
    vec_scales: bool,
    rows: int,
    inner: int,
    outer: int,
    gated: bool,
) -> QuantisedThinLaunch:
    """Choose for x (rows, inner) and a result of `outer` columns; w has twice as many if gated.

    `vec` is 8 where all rows of x are aligned to 16 bytes, or 1; `vec_scales` tells whether the
    scales of a span may be loaded at once. K is split where columns alone would leave
    multiprocessors without their CTAs.
    """
    kind = kind_of(weights, block_size)
    by_rows = rows_for(TABLE, arch)[kind]
    limit = next(limit for limit in by_rows if rows <= limit)
    config = next(
        row for columns, row in by_rows[limit].items() if columns is None or outer <= columns
    )
    parts, x_tiles = max(_TILE // limit, 1), -(-limit // _TILE)
    step = parts * (SPAN_BYTES if kind == "bytes" else 2 * SPAN_BYTES)
    steps, k_warps = config.fitted(inner, step)
    if vec == 1:
        steps = 1  # single items wait in registers of their own: of a longer burst some would spill
    tiles = -(-outer // (warp_columns(config, parts) // (1 + gated)))
    turns = -(-inner // (step * steps * k_warps))
    resident = multiprocessors * config.ctas_per_sm
    groups = min(config.warps // k_warps, _MOST_GROUPS)
    few = resident * groups // tiles
    splits = max(min(few, turns // 2), 1) if turns >= _SPLIT_TURNS else 1
    work = splits * tiles
    # Little work is spread over all multiprocessors rather than fills some.
    groups = min(groups, max(work // multiprocessors, 1))
    ctas = -(-work // groups)
    if kind == "nf4":
        ctas = min(ctas, resident)  # each makes its table once
    whole = weights == "int8" and block_size == inner
    return QuantisedThinLaunch(
        config, weights, 0 if whole else block_size, vec, vec_scales and not whole,
        parts, x_tiles, steps, groups, k_warps, tiles, splits, ctas,
    )  # fmt: skip


def warp_columns(config: QuantisedThinConfig, parts: int) -> int:
    """Return the columns of w that a group of warps sums at a time."""
    return 16 * config.tiles // parts


def thin(launch: QuantisedThinLaunch, activation: str | None, gated: bool) -> Specialisation:
    """Specialise the kernel of a product.

    Where K is split it leaves float32 sums, and `thin.merge` has the activation.
    """
    split = launch.splits > 1
    return _thin(
        launch.config,
        launch.weights,
        launch.block_size,
        launch.vec,
        launch.vec_scales,
        launch.parts,
        launch.x_tiles,
        launch.steps,
        launch.groups,
        launch.k_warps,
        None if split else activation,
        not split and gated,
        "float32" if split else "float16",
    )


@cache
def _thin(
    config: QuantisedThinConfig,
    weights: str,
    block_size: int,
    vec: int,
    vec_scales: bool,
    parts: int,
    x_tiles: int,
    steps: int,
    groups: int,
    k_warps: int,
    activation: str | None,
    gated: bool,
    out: str,
) -> Specialisation:
    kind = kind_of(weights, block_size)
    limit = _SHARED_BYTES.get(kind, _OTHERS_SHARED_BYTES)
    chunks = steps * (2 if kind == "bytes" else 4)
    columns, pass_tiles = warp_columns(config, parts), x_tiles
    while (shared := _shared_bytes(kind, columns, groups, k_warps, pass_tiles)) > limit:
        pass_tiles //= 2
    return PRODUCT.specialise(
        threads=groups * k_warps * WARP_SIZE,
        static_shared_bytes=shared,
        FORMAT=FORMATS[weights],
        BLOCK_SIZE=block_size,
        VEC=vec,
        VEC_SCALES=cpp_bool(vec_scales),
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        OUT=out,
        W_TILES=config.tiles,
        X_TILES=x_tiles,
        PARTS=parts,
        X_SLOTS=min(chunks, config.chunks),
        STEPS=steps,
        GROUPS=groups,
        K_WARPS=k_warps,
        PASS_TILES=pass_tiles,
        MIN_CTAS=config.ctas_per_sm if vec > 1 and vec_scales else 1,
    )


def _shared_bytes(kind: str, columns: int, groups: int, k_warps: int, pass_tiles: int) -> int:
    """Count the codebook's table, all warps' sums for some rows, two numbers for each column.

    Smem in thin.cu asserts it.
    """
    line = columns + (4 if columns >= 8 else 1)
    sums = k_warps * pass_tiles * _TILE * line
    own = groups * (sums + 2 * columns) * FLOAT_BYTES
    return own if kind != "nf4" else _TABLE_BYTES + -(-own // VECTOR_BYTES) * VECTOR_BYTES


# Of each format's blocks, the usual and the one that a span has most of.
_CATALOGUE = {"nf4": (64, 32), "int4": (128, 32), "int8": (0, 32), "q4_1": (32,), "q4_k": (32,)}


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every row for a format's usual blocks, and single items and other blocks once."""
    for weights, block_sizes in _CATALOGUE.items():
        for block_size in block_sizes:
            by_rows = rows_for(TABLE, arch)[kind_of(weights, block_size)]
            for limit, by_columns in by_rows.items():
                shape = max(_TILE // limit, 1), -(-limit // _TILE)
                for config in by_columns.values():
                    sizes = (*shape, max(config.steps), *_full(config))
                    yield _thin(
                        config, weights, block_size, 8, block_size > 0, *sizes,
                        None, False, "float16",
                    )  # fmt: skip
        sizes = (*shape, 1, *_full(config))
        yield _thin(config, weights, block_size, 1, False, *sizes, "silu", True, "float16")


def _full(config: QuantisedThinConfig) -> tuple[int, int]:
    """Return the groups of a long K, and their warps."""
    return min(config.warps // config.k_warps, _MOST_GROUPS), config.k_warps
