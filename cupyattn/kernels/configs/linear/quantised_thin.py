"""Launch configurations of products with few rows and a quantised weight, on tensor cores.

As of float16 (`thin`), bytes in flight are what is wanted. There are a quarter as many for a
number of k, so that a burst of a whole K is in reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from cupyattn.kernels.arch import TURING, WARP_SIZE
from cupyattn.kernels.configs.dtypes import VECTOR_BYTES
from cupyattn.kernels.configs.linear.float32 import STRUCTS
from cupyattn.kernels.configs.linear.quantised import FORMATS
from cupyattn.kernels.configs.linear.thin import EPILOGUE
from cupyattn.kernels.configs.tables import FLOAT_BYTES, cpp_bool, rows_for
from cupyattn.kernels.spec import KernelSpec, Specialisation, inputs

PRODUCT = KernelSpec(
    "linear_quantised_thin",
    "linear/quantised/thin.cu",
    (*inputs("x", "codes", "scales"), *inputs("super_scales", optional=True), *EPILOGUE),
)
KERNELS = (PRODUCT,)

MAX_ROWS = 32
"""Of x. Tiles of many rows take over: at 64 rows they are 0.8 to 1.7 times as fast

(an H200 as compute_75 code, 2026-11-23, nf4 and int4 at four sizes, in a sweep that is not kept).
"""
SPAN_BYTES = 64
"""Of a column's codes, which four lanes read."""


@dataclass(frozen=True)
class QuantisedThinConfig:
    """How a CTA shares the columns of w and k among its warps.

    Attributes
    ----------
    tiles : int
        Of a warp: 16 columns each, over the parts of K that fill the tile of x.
    steps : tuple of int
        Lengths of a burst to choose from, in spans of a column times parts.
    warps : int
        Of a CTA, at most.
    k_warps : int
        At most so many of them share columns and split K.
    ctas_per_sm : int
        Of Turing: what the compiler keeps registers for.
    chunks : int
        Of 8 k of a tile of x, that wait with a burst.
    """

    tiles: int
    steps: tuple[int, ...]
    warps: int
    k_warps: int
    ctas_per_sm: int
    chunks: int
    reason: str

    def fitted(self, inner: int, step_items: int) -> tuple[int, int]:
        """Return the steps of a burst and the warps that split K.

        Of those whose turns cover K with at most an eighth more zeros than need be (idle warps are
        bytes that are not in flight) the ones with the fewest turns, and then the longest burst.
        """

        def turns(choice: tuple[int, int]) -> int:
            return -(-inner // (choice[0] * choice[1] * step_items))

        def covered(choice: tuple[int, int]) -> int:
            return turns(choice) * choice[0] * choice[1]

        choices = [(s, k) for s in self.steps for k in range(1, self.k_warps + 1)]
        enough = min(map(covered, choices)) * 9 / 8
        fitting = (choice for choice in choices if covered(choice) <= enough)
        return min(fitting, key=lambda choice: (turns(choice), -choice[0]))


Table = Mapping[str, Mapping[int, Mapping[int | None, QuantisedThinConfig]]]
"""By kind (`kind_of`), by the most rows of x, by the most columns of the result."""

_ROW = QuantisedThinConfig
# Numbers are shares of the speed of a kernel that only reads the same bytes, on an H200 as
# compute_75 code, 2026-11-23, over the benchmark's sizes, in a sweep that is not kept; `benchmark
# linear --kind thin --weights nf4 int4` times the rows as they are. Rows without a number are
# chosen by their count of instructions and of bytes in flight.
_TURING: Table = {
    "nf4": {
        1: {
            4096: _ROW(2, (1,), 16, 8, 1, 2, "eight warps share K: 0.39 to 0.52"),
            None: _ROW(2, (1, 2), 16, 8, 1, 2, "bursts of two steps: 0.41 to 0.56"),
        },
        2: {None: _ROW(2, (1,), 16, 8, 1, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 16, 8, 1, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(2, (1,), 8, 8, 1, 4, "eight warps share K: 0.38 instead of 0.31"),
            None: _ROW(1, (1,), 16, 4, 1, 4, "four warps share K: 0.48"),
        },
        16: {
            4096: _ROW(2, (1,), 8, 8, 1, 2, "as 8 rows: 0.34"),
            None: _ROW(1, (1,), 16, 4, 1, 2, "as 8 rows: 0.39"),
        },
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "wide": {
        1: {
            4096: _ROW(2, (1,), 8, 8, 3, 2, "eight warps share K: 0.62 to 0.69"),
            None: _ROW(4, (1,), 4, 4, 4, 2, "small CTAs are done at once: 0.57 to 0.75"),
        },
        2: {None: _ROW(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(2, (1,), 8, 8, 2, 4, "eight warps share K: 0.54"),
            None: _ROW(2, (1,), 8, 4, 2, 4, "32 columns and 64 bytes of each a warp: 0.68"),
        },
        16: {None: _ROW(2, (1,), 8, 8, 1, 2, "32 columns a warp: 0.34 to 0.42")},
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "narrow": {
        1: {None: _ROW(2, (1,), 8, 8, 2, 2, "4 columns, 512 bytes of each a warp: 0.40 to 0.50")},
        2: {None: _ROW(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {None: _ROW(2, (1,), 8, 8, 2, 4, "32 columns, 64 bytes of each a warp: 0.41 to 0.50")},
        16: {None: _ROW(1, (1,), 8, 8, 2, 2, "16 columns: x takes registers; 0.32 to 0.34")},
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
    "bytes": {
        1: {
            4096: _ROW(4, (1,), 8, 8, 2, 4, "eight warps share K: 0.76 to 0.83"),
            None: _ROW(4, (1,), 8, 4, 2, 4, "four warps share K: 0.76 to 0.87"),
        },
        2: {None: _ROW(4, (1,), 8, 8, 2, 4, "16 columns and 256 bytes of each a warp")},
        4: {None: _ROW(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _ROW(1, (2,), 8, 8, 3, 4, "a third CTA: 0.65"),
            None: _ROW(2, (2,), 8, 8, 2, 4, "32 columns and 64 bytes of each a warp: 0.89"),
        },
        16: {
            4096: _ROW(1, (1, 2), 8, 8, 2, 2, "16 columns: x takes registers; 0.57"),
            None: _ROW(2, (1,), 8, 8, 2, 2, "32 columns a warp: 0.77"),
        },
        32: {None: _ROW(1, (1,), 8, 8, 1, 1, "as 16 rows")},
    },
}  # fmt: skip
TABLE: Mapping[int, Table] = {75: _TURING}

_TABLE_BYTES = 32_768  # the codebook's pairs, of "nf4"
_SHARED_BYTES = {"nf4": 49_152}
_OTHERS_SHARED_BYTES = 32_768
"""At most: what a CTA has without asking for more, or half of what an SM of Turing has."""
_NARROW = 32
_TILE = 8  # rows of x
_MOST_GROUPS = 15  # the barriers of a CTA, less that of all its threads
_SPLIT_TURNS = 8
"""Turns of a CTA round its warps, below which a split of K costs more than it saves."""


def kind_of(weights: str, block_size: int) -> str:
    """Return which rows of the table a format takes: "nf4", "wide", "narrow" or "bytes".

    "wide" and "narrow" are integers of four bits in blocks of 64 and more, or of 32, whose scales
    take as many registers as the codes.

    Examples
    --------
    >>> [kind_of(*each) for each in (("nf4", 64), ("int4", 64), ("q4_k", 32), ("int8", 32))]
    ['nf4', 'wide', 'narrow', 'bytes']
    """
    narrow = "narrow" if block_size == _NARROW else "wide"
    return {"nf4": "nf4", "int8": "bytes"}.get(weights, narrow)


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
