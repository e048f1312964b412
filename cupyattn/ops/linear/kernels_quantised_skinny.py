"""Skinny products (M <= 32) of a quantised weight: kernels and plans.

Those on tensor cores are bound by bytes in flight, as in float16 (`kernels_skinny`). K has a
quarter of the bytes, so one burst can cover all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cupyattn.ops.linear.kernels_quantised import FORMAT_STRUCTS
from cupyattn.ops.linear.kernels_skinny import (
    EPILOGUE,
    Epilogue,
    product_epilogue,
    product_steps,
    relative,
    skinny_params,
)
from cupyattn.ops.linear.problem import (
    READS_ONCE,
    STRUCTS,
    ForwardDraft,
    ForwardProblem,
    LinearPlan,
    Plans,
)
from cupyattn.ops.linear.weight_formats import FORMATS
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.plan import Step
from cupyattn.runtime.spec import KernelSpec, Specialisation, inputs
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

PRODUCT = KernelSpec(
    "linear_quantised_thin",
    "linear/quantised/skinny.cu",
    (*inputs("x", "codes", "scales"), *inputs("super_scales", optional=True), *EPILOGUE),
)
FLOAT_SKINNY = KernelSpec(
    "linear_quantised_thin_f32", "linear/quantised/skinny_float32.cu", PRODUCT.parameters
)
KERNELS = (PRODUCT, FLOAT_SKINNY)

MAX_ROWS = 32
"""Maximum rows of x. At 64 rows, tiles of 128 rows are 0.8 to 1.7 times as fast

(an H200 as compute_75 code, 2026-11-23, nf4 and int4 at four sizes).
"""
SPAN_BYTES = 64
"""Bytes of a column's codes that four lanes read."""

_TABLE_BYTES = 32_768  # the codebook's pairs, of "nf4"
_SHARED_BYTES = {"nf4": 49_152}
_OTHERS_SHARED_BYTES = 32_768
"""Maximum of shared memory: the static limit of a CTA, or half of a Turing multiprocessor's."""
_TILE = 8  # rows of x
_MOST_GROUPS = 15  # the barriers of a CTA, less that of all its threads
_SPLIT_ITERATIONS = 8
"""Iterations of a CTA below which a split of K costs more than it saves."""


@dataclass(frozen=True)
class QuantisedSkinnyConfig:
    """The division of a CTA's columns of w, and of K, among its warps.

    Attributes
    ----------
    tiles : int
        Tiles of a warp: 16 columns each, over the parts of K that fill the tile of x.
    steps : tuple of int
        Lengths of a burst to choose from, in spans of a column times parts.
    warps : int
        Maximum of a CTA's warps.
    k_warps : int
        Maximum of warps that split K for the same columns.
    ctas_per_sm : int
        CTAs on a multiprocessor of Turing that the compiler keeps registers for.
    chunks : int
        Chunks of 8 items of K of a tile of x that wait with a burst.
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

        Candidates cover K with at most an eighth more zeros than the best: idle warps have no bytes
        in flight. Among them, the fewest iterations win, then the longest burst.
        """

        def iterations(choice: tuple[int, int]) -> int:
            return -(-inner // (choice[0] * choice[1] * step_items))

        def covered(choice: tuple[int, int]) -> int:
            return iterations(choice) * choice[0] * choice[1]

        choices = [(s, k) for s in self.steps for k in range(1, self.k_warps + 1)]
        enough = min(map(covered, choices)) * 9 / 8
        fitting = (choice for choice in choices if covered(choice) <= enough)
        return min(fitting, key=lambda choice: (iterations(choice), -choice[0]))


QuantisedSkinnyTable = Mapping[str, Mapping[int, Mapping[int | None, QuantisedSkinnyConfig]]]
"""Configurations by kind (`kind_of`), by maximum rows of x, by maximum columns of the result."""

_Config = QuantisedSkinnyConfig
# Numbers are speeds relative to a kernel that only reads the same bytes, on an H200 as compute_75
# code, 2026-11-23, over the benchmark's sizes; `benchmark linear --kind thin --weights nf4 int4`
# times the configurations as they are. Configurations without a number are chosen by their count of
# instructions and of bytes in flight.
_TURING: QuantisedSkinnyTable = {
    "nf4": {
        1: {
            4096: _Config(2, (1,), 16, 8, 1, 2, "eight warps share K: 0.43 to 0.55"),
            None: _Config(2, (1, 2), 16, 8, 1, 2, "bursts of two steps: 0.42 to 0.64"),
        },
        2: {None: _Config(2, (1,), 16, 8, 1, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _Config(2, (1,), 16, 8, 1, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _Config(2, (1,), 8, 8, 1, 4, "eight warps share K: 0.38 instead of 0.31"),
            None: _Config(1, (1,), 16, 4, 1, 4, "four warps share K: 0.48"),
        },
        16: {
            4096: _Config(2, (1,), 8, 8, 1, 2, "eight warps share K: 0.34"),
            None: _Config(1, (1,), 16, 4, 1, 2, "four warps share K: 0.39"),
        },
        32: {None: _Config(1, (1,), 8, 8, 1, 1, "16 columns a warp: x takes registers")},
    },
    "wide": {
        1: {
            4096: _Config(2, (1,), 8, 8, 3, 2, "eight warps share K: 0.62 to 0.69"),
            None: _Config(4, (1,), 4, 4, 4, 2, "all small CTAs are resident at once: 0.57 to 0.75"),
        },
        2: {None: _Config(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _Config(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _Config(2, (1,), 8, 8, 2, 4, "eight warps share K: 0.54"),
            None: _Config(2, (1,), 8, 4, 2, 4, "32 columns and 64 bytes of each a warp: 0.68"),
        },
        16: {None: _Config(2, (1,), 8, 8, 1, 2, "32 columns a warp: 0.34 to 0.42")},
        32: {None: _Config(1, (1,), 8, 8, 1, 1, "16 columns a warp: x takes registers")},
    },
    "narrow": {
        1: {None: _Config(2, (1,), 8, 8, 2, 2, "4 columns, 512 bytes of each a warp: 0.4 to 0.5")},
        2: {None: _Config(2, (1,), 8, 8, 2, 4, "8 columns and 256 bytes of each a warp")},
        4: {None: _Config(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {None: _Config(2, (1,), 8, 8, 2, 4, "32 columns, 64 bytes of each a warp: 0.41 to 0.5")},
        16: {None: _Config(1, (1,), 8, 8, 2, 2, "16 columns: x takes registers; 0.32 to 0.34")},
        32: {None: _Config(1, (1,), 8, 8, 1, 1, "16 columns a warp: x takes registers")},
    },
    "bytes": {
        1: {
            4096: _Config(4, (1,), 8, 8, 2, 4, "eight warps share K: 0.76 to 0.83"),
            None: _Config(4, (1,), 8, 4, 2, 4, "four warps share K: 0.76 to 0.87"),
        },
        2: {None: _Config(4, (1,), 8, 8, 2, 4, "16 columns and 256 bytes of each a warp")},
        4: {None: _Config(2, (1,), 8, 8, 2, 4, "16 columns and 128 bytes of each a warp")},
        8: {
            4096: _Config(1, (2,), 8, 8, 3, 4, "a third CTA: 0.65"),
            None: _Config(2, (2,), 8, 8, 2, 4, "32 columns and 64 bytes of each a warp: 0.89"),
        },
        16: {
            4096: _Config(1, (1, 2), 8, 8, 2, 2, "16 columns: x takes registers; 0.57"),
            None: _Config(2, (1,), 8, 8, 2, 2, "32 columns a warp: 0.77"),
        },
        32: {None: _Config(1, (1,), 8, 8, 1, 1, "16 columns a warp: x takes registers")},
    },
}
CONFIGURATIONS: Mapping[int, QuantisedSkinnyTable] = {75: _TURING}

_NARROW = 32


def kind_of(weights: str, block_size: int) -> str:
    """Return the kind of a format's configurations: "nf4", "wide", "narrow" or "bytes".

    "wide" and "narrow" are integers of four bits: "wide" in blocks of 64 and more, "narrow" in
    blocks of 32, whose scales take as many registers as the codes.

    Examples
    --------
    >>> [kind_of(*each) for each in (("nf4", 64), ("int4", 64), ("q4_k", 32), ("int8", 32))]
    ['nf4', 'wide', 'narrow', 'bytes']
    """
    narrow = "narrow" if block_size == _NARROW else "wide"
    return {"nf4": "nf4", "int8": "bytes"}.get(weights, narrow)


class QuantisedSkinnyKernel(NamedTuple):
    """A configuration, and the choices within it: all that a kernel is compiled for."""

    config: QuantisedSkinnyConfig
    weights: str
    """The format."""
    block_size: int
    """0 for "int8" blocks that are whole rows."""
    vec: int
    vec_scales: bool
    parts: int
    """Neighbouring spans of a column that fill a tile of x."""
    x_tiles: int
    """Tiles of eight rows."""
    steps: int
    groups: int
    k_warps: int


class QuantisedSkinnyLaunch(NamedTuple):
    """The kernel of a product, and its grid."""

    kernel: QuantisedSkinnyKernel
    tiles: int
    """Tiles of columns, each computed by a group of warps."""
    splits: int
    """Splits of K."""
    ctas: int


def skinny_launch(
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
) -> QuantisedSkinnyLaunch:
    """Choose for x (rows, inner) and a result of `outer` columns; w has twice as many if gated.

    `vec` is 8 if all rows of x are aligned to 16 bytes, otherwise 1. `vec_scales` tells whether the
    scales of a span may be loaded at once. K is split if the columns have too few CTAs for all
    multiprocessors.
    """
    kind = kind_of(weights, block_size)
    by_rows = rows_for(CONFIGURATIONS, arch)[kind]
    limit = next(limit for limit in by_rows if rows <= limit)
    config = next(
        row for columns, row in by_rows[limit].items() if columns is None or outer <= columns
    )
    parts, x_tiles = max(_TILE // limit, 1), -(-limit // _TILE)
    step = parts * (SPAN_BYTES if kind == "bytes" else 2 * SPAN_BYTES)
    steps, k_warps = config.fitted(inner, step)
    if vec == 1:
        steps = 1  # single items take a register each: a longer burst would spill
    tiles = -(-outer // (warp_columns(config, parts) // (1 + gated)))
    iterations = -(-inner // (step * steps * k_warps))
    resident = multiprocessors * config.ctas_per_sm
    groups = min(config.warps // k_warps, _MOST_GROUPS)
    few = resident * groups // tiles
    splits = max(min(few, iterations // 2), 1) if iterations >= _SPLIT_ITERATIONS else 1
    work = splits * tiles
    # A small product is spread over all multiprocessors instead of filling a few.
    groups = min(groups, max(work // multiprocessors, 1))
    ctas = -(-work // groups)
    if kind == "nf4":
        ctas = min(ctas, resident)  # each CTA computes its table once
    whole = weights == "int8" and block_size == inner
    blocks = (0 if whole else block_size, vec, vec_scales and not whole)
    warps = (parts, x_tiles, steps, groups, k_warps)
    kernel = QuantisedSkinnyKernel(config, weights, *blocks, *warps)
    return QuantisedSkinnyLaunch(kernel, tiles, splits, ctas)


def warp_columns(config: QuantisedSkinnyConfig, parts: int) -> int:
    """Return the columns of w that a group of warps sums at a time."""
    return 16 * config.tiles // parts


@cache
def skinny(kernel: QuantisedSkinnyKernel, epilogue: Epilogue) -> Specialisation:
    """Specialise the kernel of a product."""
    config, weights, block_size, vec, vec_scales, *counts = kernel
    parts, x_tiles, steps, groups, k_warps = counts
    activation, gated, out = epilogue
    kind = kind_of(weights, block_size)
    limit = _SHARED_BYTES.get(kind, _OTHERS_SHARED_BYTES)
    chunks = steps * (2 if kind == "bytes" else 4)
    columns, pass_tiles = warp_columns(config, parts), x_tiles
    while (shared := _shared_bytes(kind, columns, groups, k_warps, pass_tiles)) > limit:
        pass_tiles //= 2
    return PRODUCT.specialise(
        threads=groups * k_warps * WARP_SIZE,
        static_shared_bytes=shared,
        reason=relative(config.reason),
        FORMAT=FORMAT_STRUCTS[weights],
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
    """Count the codebook's table, all warps' sums of some rows, and two numbers a column.

    Smem in skinny.cu asserts the result.
    """
    line = columns + (4 if columns >= 8 else 1)
    sums = k_warps * pass_tiles * _TILE * line
    own = groups * (sums + 2 * columns) * FLOAT_BYTES
    return own if kind != "nf4" else _TABLE_BYTES + -(-own // VECTOR_BYTES) * VECTOR_BYTES


# A GTX 1650 Ti needs 8 bytes of codes a cycle of a multiprocessor; decoding and products of one row
# take about five instructions a weight, and with 16 warps that is about what there is.
FLOAT_ROWS = (1, 2, 4, 8)
"""Rows of x that the skinny kernel is compiled for."""
MAX_FLOAT_ROWS = 16
"""Maximum of skinny rows: for more, the tiles dequantise less often."""
X_VECTOR = 4
"""Items of x of one vector load."""
_FLOAT_WARPS = 8
_FLOAT_COLUMNS = 4  # of a warp


@cache
def float_skinny(
    weights: str,
    block_size: int,
    dtype: str,
    vec: int,
    rows: int,
    activation: str | None,
    gated: bool,
) -> Specialisation:
    """Specialise the skinny kernel; block_size is 0 for "int8" blocks that are whole rows."""
    run_items = WARP_SIZE * VECTOR_BYTES * (1 if weights == "int8" else 2)
    return FLOAT_SKINNY.specialise(
        threads=_FLOAT_WARPS * WARP_SIZE,
        static_shared_bytes=rows * run_items * FLOAT_BYTES,
        reason=f"{rows} rows of x for each weight that is decoded; 16 warps on a multiprocessor",
        FORMAT=FORMAT_STRUCTS[weights],
        BLOCK_SIZE=block_size,
        DTYPE=dtype,
        VEC=vec,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        ROWS=rows,
        COLUMNS=_FLOAT_COLUMNS,
        MIN_CTAS=2,
    )


_FLOAT_BLOCKS = (("nf4", 64), ("int4", 128), ("int8", 0), ("int8", 32), ("q4_1", 32), ("q4_k", 32))


# The usual block size of each format, and the smallest.
_CATALOGUE = {"nf4": (64, 32), "int4": (128, 32), "int8": (0, 32), "q4_1": (32,), "q4_k": (32,)}


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration for a format's usual blocks, and scalar accesses once."""
    for weights, block_sizes in _CATALOGUE.items():
        for block_size in block_sizes:
            by_rows = rows_for(CONFIGURATIONS, arch)[kind_of(weights, block_size)]
            for limit, by_columns in by_rows.items():
                shape = max(_TILE // limit, 1), -(-limit // _TILE)
                for config in by_columns.values():
                    sizes = (*shape, max(config.steps), *_full(config))
                    blocks = (block_size, 8, block_size > 0)
                    kernel = QuantisedSkinnyKernel(config, weights, *blocks, *sizes)
                    yield skinny(kernel, (None, False, "float16"))
        sizes = (*shape, 1, *_full(config))
        kernel = QuantisedSkinnyKernel(config, weights, block_size, 1, False, *sizes)
        yield skinny(kernel, ("silu", True, "float16"))
    kinds = ((None, False), ("gelu", False), ("silu", True))
    for (weights, block_size), dtype, rows, (activation, gated), vec in pairs(
        _FLOAT_BLOCKS, tuple(STORAGE), FLOAT_ROWS, kinds, (1, X_VECTOR)
    ):
        yield float_skinny(weights, block_size, dtype, vec, rows, activation, gated)


def _full(config: QuantisedSkinnyConfig) -> tuple[int, int]:
    """Return the groups of warps for a long K, and their warps."""
    return min(config.warps // config.k_warps, _MOST_GROUPS), config.k_warps


_MOST_VECTORS = 2**31
"""Maximum of codes: kernels count them in 32 bits."""


def streams(problem: ForwardProblem) -> bool:
    """Tell whether rows of codes are columns of w, and few enough to be counted."""
    weight = problem.quantised
    codes = weight.codes.rows * weight.codes.columns
    return not weight.transposed and codes <= _MOST_VECTORS * VECTOR_BYTES


def _takes(problem: ForwardProblem) -> bool:
    return problem.rows <= MAX_ROWS and streams(problem)


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward."""
    problem, slots, weight = draft.problem, draft.slots, draft.problem.quantised
    launch = skinny_launch(
        draft.traits.arch,
        draft.traits.multiprocessors,
        weight.format,
        weight.block_size,
        _vector(problem),
        vec_scales=_whole_spans(problem),
        rows=problem.rows,
        inner=problem.inner,
        outer=problem.outer,
        gated=problem.gated,
    )
    product = skinny(launch.kernel, product_epilogue(problem, launch.splits))
    operands = (slots.x, slots.codes, slots.scales, slots.super_scales)
    return product_steps(draft, product, operands, ctas=launch.ctas, splits=launch.splits)


def _vector(problem: ForwardProblem) -> int:
    """Return 8 if all loads of x may have 16 bytes, otherwise 1."""
    whole = vector_items(problem.dtype.name)
    return whole if problem.vector(problem.x) == whole else 1


def _whole_spans(problem: ForwardProblem) -> bool:
    """Tell whether the scales of each span of codes may be loaded at once."""
    weight = problem.quantised
    form = FORMATS[weight.format]
    blocks = max(SPAN_BYTES * 8 // form.bits // weight.block_size, 1)
    return weight.scales.vector >= blocks * form.numbers


def _takes_float(problem: ForwardProblem) -> bool:
    return problem.rows <= MAX_FLOAT_ROWS and streams(problem)


def _float_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward in float32 arithmetic: one launch."""
    problem, slots, weight = draft.problem, draft.slots, draft.problem.quantised
    whole = weight.format == "int8" and weight.block_size == problem.inner
    tile_rows = next((most for most in FLOAT_ROWS if problem.rows <= most), FLOAT_ROWS[-1])
    kernel = float_skinny(
        weight.format,
        0 if whole else weight.block_size,
        problem.dtype.name,
        X_VECTOR if problem.vector(problem.x) >= X_VECTOR else 1,
        tile_rows,
        problem.scalar_activation,
        problem.gated,
    )
    columns = _FLOAT_WARPS * _FLOAT_COLUMNS // (1 + problem.gated)
    ctas = -(-problem.rows // tile_rows) * -(-problem.outer // columns)
    arrays = (
        *(slots.x, slots.codes, slots.scales, slots.super_scales),
        *(slots.b, slots.residual, slots.preactivation, slots.out),
    )
    return (Step.of(kernel, ctas, arrays, skinny_params(problem)),)


PLANS: Plans = (
    LinearPlan(
        "forward",
        ("float16",),
        _forward_steps,
        READS_ONCE.format(most=MAX_ROWS),
        _takes,
        tensor_cores=True,
    ),
    LinearPlan(
        "forward",
        tuple(STORAGE),
        _float_steps,
        READS_ONCE.format(most=MAX_FLOAT_ROWS),
        _takes_float,
    ),
)
