"""Skinny products (M <= 64) of 16-bit floats, which read the weight once: kernels and plans.

They are bound by bytes in flight: a configuration needs bursts of 8 to 10 loads of 16 bytes a
thread, 16 to 24 warps on a multiprocessor, and enough CTAs for all multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyattn.ops.linear.problem import (
    HALVES,
    READS_ONCE,
    STRUCTS,
    ForwardDraft,
    ForwardProblem,
    LinearPlan,
    Plans,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.device.traits import NATIVE_ARCH
from cupyattn.runtime.plan import Step
from cupyattn.runtime.spec import (
    KernelSpec,
    Parameter,
    Pointer,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, rows_for
from cupyattn.runtime.tuning import USUAL, Choices

# ThinParams in cuda_src/linear/skinny/tile.cuh
SKINNY_PARAMS = np.dtype(
    [
        *(
            (f"{array}_stride", np.int64)
            for array in ("x", "w", "residual", "preactivation", "out")
        ),
        *((size, np.int32) for size in ("rows", "inner", "outer", "splits")),
    ],
    align=True,
)
SKINNY_STRUCT = StructParameter("params", SKINNY_PARAMS, "ThinParams")

EPILOGUE: tuple[Parameter, ...] = (
    *inputs("b", "residual", optional=True),
    Pointer("preactivation", optional=True),
    Pointer("out"),
    SKINNY_STRUCT,
)
_PRODUCT = (*inputs("x", "w"), *EPILOGUE)
SKINNY = KernelSpec("linear_thin", "linear/skinny/product.cu", _PRODUCT)
SKINNY_ROW = KernelSpec("linear_thin_row", "linear/skinny/row.cu", _PRODUCT)
SKINNY_MERGE = KernelSpec(
    "linear_thin_merge", "linear/skinny/merge.cu", (*inputs("partials"), *EPILOGUE)
)
KERNELS = (SKINNY, SKINNY_ROW, SKINNY_MERGE)

MAX_ROWS = 64
"""Maximum rows of x. A CTA sums all of them, except in the kernel for one row."""


@dataclass(frozen=True)
class SkinnyConfig:
    """The division of a CTA's columns of w, and of K, among its warps.

    Attributes
    ----------
    tile : int
        Tiles of 16 columns of a warp, for the tensor cores. In the kernel for one row of x: groups
        of 8 columns of a warp if w is contiguous along N, and 1, two columns a warp, along K.
    steps : tuple of int
        Lengths of a burst to choose from, in steps.
    groups, k_warps : int
        Warps with different columns, and warps that split K for the same columns.
    ctas_per_sm : int
        CTAs on a multiprocessor of Turing that the compiler keeps registers for.
    """

    tile: int
    steps: tuple[int, ...]
    groups: int
    k_warps: int
    ctas_per_sm: int
    reason: str

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.groups * self.k_warps * WARP_SIZE

    def steps_for(self, inner: int, step_items: int) -> int:
        """Return the burst whose iterations over the warps cover K with the fewest zeros.

        The longer of two equal ones has more bytes in flight. A burst of a warp's whole K has one
        latency.
        """

        def covered(steps: int) -> int:
            iteration = steps * step_items * self.k_warps
            return -(-inner // iteration) * iteration

        return min(sorted(self.steps, reverse=True), key=covered)


SkinnyTable = Mapping[bool, Mapping[int, Mapping[int | None, SkinnyConfig]]]
"""Configurations by whether w is contiguous along K, by maximum rows of x, by maximum columns."""

_Config = SkinnyConfig
# Chosen among a dozen candidates each, timed on an H200 as compute_75 code, 2026-11-22. `benchmark
# linear --kind thin` times the configurations as they are. Numbers are speeds relative to a kernel
# that only reads w, over the benchmark's sizes. Bytes in flight are the limit, as on a T4, which
# has a quarter of an H200's bandwidth a multiprocessor.
_TURING: SkinnyTable = {
    True: {
        1: {
            2048: _Config(1, (4, 1), 1, 8, 3, "2048 x 8192: eight warps a column pair, 0.93"),
            None: _Config(1, (5, 4, 2), 1, 4, 5, "all CTAs are resident at once: 0.92 to 0.99"),
        },
        8: {None: _Config(1, (5, 4), 1, 8, 2, "16 columns: eight warps share a long K")},
        16: {
            4096: _Config(1, (5, 4), 1, 8, 2, "2560 x 2560 fill the GPU: 0.73 instead of 0.65"),
            None: _Config(2, (1,), 1, 8, 3, "a third CTA and short bursts: 0.83 to 0.91"),
        },
        32: {
            4096: _Config(2, (2,), 1, 8, 2, "32 columns a CTA; a long K is split"),
            None: _Config(2, (2,), 2, 4, 2, "two warps share the loads of x: 0.64 to 0.79"),
        },
        64: {
            4096: _Config(2, (2,), 1, 8, 1, "32 columns a CTA; a long K is split"),
            None: _Config(2, (1,), 4, 3, 1, "twelve warps: 0.40 to 0.58, bound by x from L1"),
        },
    },
    False: {
        1: {
            4096: _Config(4, (1,), 1, 20, 1, "32 columns a CTA: 2560 are 80 CTAs, 0.93"),
            32768: _Config(4, (1,), 1, 8, 3, "64 bytes of a row; L2 keeps the rest for others"),
            None: _Config(4, (1,), 2, 4, 3, "128 bytes of a row: 128256 x 2048 0.95, not 0.81"),
        },
        8: {
            4096: _Config(2, (2,), 1, 16, 1, "32 columns a CTA instead of a split K"),
            None: _Config(4, (1,), 1, 8, 2, "128 bytes of a row at once: 0.81 to 0.94"),
        },
        16: {
            4096: _Config(2, (2,), 1, 16, 1, "32 columns a CTA instead of a split K"),
            None: _Config(4, (1,), 1, 8, 2, "128 bytes of a row at once: 0.78 to 0.89"),
        },
        32: {
            4096: _Config(2, (1,), 1, 8, 2, "32 columns a CTA; a long K is split"),
            None: _Config(4, (1,), 1, 6, 2, "128 bytes of a row at once: 0.62 to 0.81"),
        },
        64: {
            4096: _Config(2, (1,), 1, 12, 1, "32 columns a CTA: 0.37 to 0.40"),
            None: _Config(2, (1,), 4, 3, 1, "twelve warps: 0.39 to 0.56, bound by x from L1"),
        },
    },
}
CONFIGURATIONS: Mapping[int, SkinnyTable] = {75: _TURING}

SHARED_BYTES = 32_768
"""At most, so that two CTAs fit an SM."""
_STEP_ITEMS = 32  # k of a step on the tensor cores
_LANE_ITEMS = 8  # k of one load
_TILES_IN_FLIGHT = 8  # tiles of x that wait with a burst of w
_SPLIT_ITERATIONS = 8
"""Iterations of a CTA below which a split of K costs more than it saves."""


class SkinnyKernel(NamedTuple):
    """A configuration, and the choices within it: all that a kernel is compiled for."""

    config: SkinnyConfig
    along_k: bool
    vec: int
    x_tiles: int
    """Tiles of eight rows; 0 for the kernel of one row."""
    steps: int
    dtype: str = "float16"


class SkinnyLaunch(NamedTuple):
    """The kernel of a skinny product, and its grid."""

    kernel: SkinnyKernel
    tiles: int
    """CTAs along the columns."""
    splits: int
    """Splits of K."""


def configurations(arch: int, *, along_k: bool, rows: int) -> tuple[int, dict[str, SkinnyConfig]]:
    """Return the limit of rows that a number of rows is below, and configurations by columns."""
    by_rows = rows_for(CONFIGURATIONS, arch)[along_k]
    limit = next(limit for limit in by_rows if rows <= limit)
    return limit, {str(columns): config for columns, config in by_rows[limit].items()}


def usual_columns(configs: Iterable[str], outer: int) -> str:
    """Return the smallest maximum of columns that a result does not exceed.

    Examples
    --------
    >>> usual_columns(["2048", "None"], 3000)
    'None'
    """
    return next(name for name in configs if name == "None" or outer <= int(name))


def skinny_launch(
    arch: int,
    multiprocessors: int,
    vec: int,
    *,
    along_k: bool,
    rows: int,
    inner: int,
    outer: int,
    gated: bool,
    choices: Choices = USUAL,
) -> SkinnyLaunch:
    """Choose for x (rows, inner) and a result of `outer` columns; w has twice as many if gated.

    `vec` is 8 if all rows of x and w are aligned to 16 bytes, otherwise 1. K is split if the
    columns have too few CTAs for all multiprocessors. `choices` picks one of the configurations for
    as many rows.
    """
    limit, among = configurations(arch, along_k=along_k, rows=rows)
    problem = limit, outer, inner, "gated" if gated else "plain", "nk" if along_k else "kn", vec
    config = choices.pick(SKINNY.entry, problem, among, usual=usual_columns(among, outer))
    x_tiles = limit // _LANE_ITEMS
    step = step_items(config, x_tiles)
    # Single items take a register each: a longer burst would spill.
    steps = config.steps_for(inner, step) if vec > 1 else 1
    columns = config.groups * _warp_columns(config, along_k, x_tiles) // (1 + gated)
    tiles = -(-outer // columns)
    iterations = -(-inner // (step * steps * config.k_warps))
    splits = (
        min(multiprocessors * config.ctas_per_sm // tiles, iterations // 2)
        if iterations >= _SPLIT_ITERATIONS
        else 1
    )
    kernel = SkinnyKernel(config, along_k, vec, x_tiles, steps)
    return SkinnyLaunch(kernel, tiles, max(splits, 1))


def step_items(config: SkinnyConfig, x_tiles: int) -> int:
    """Return the items of K in a warp's step."""
    return _STEP_ITEMS if x_tiles else WARP_SIZE // config.tile * _LANE_ITEMS


def _warp_columns(config: SkinnyConfig, along_k: bool, x_tiles: int) -> int:
    if x_tiles:
        return 16 * config.tile
    return 2 if along_k else 8 * config.tile


Epilogue = tuple[str | None, bool, str]
"""An activation, whether it is gated, and the dtype that a kernel writes."""


def product_epilogue(problem: ForwardProblem, splits: int) -> Epilogue:
    """Return the epilogue of a product: with a split K, `merge` applies the activation."""
    if splits > 1:
        return None, False, "float32"
    return problem.scalar_activation, problem.gated, problem.dtype.name


@cache
def skinny(kernel: SkinnyKernel, epilogue: Epilogue) -> Specialisation:
    """Specialise the kernel of a product."""
    config, along_k, vec, x_tiles, steps, dtype = kernel
    activation, gated, out = epilogue
    columns = _warp_columns(config, along_k, x_tiles)
    sizes: dict[str, Any] = {
        "VEC": vec,
        "STEPS": steps,
        "GROUPS": config.groups,
        "K_WARPS": config.k_warps,
        "MIN_CTAS": config.ctas_per_sm if vec > 1 else 1,
    }
    if x_tiles:
        pass_tiles = x_tiles
        while _skinny_shared_bytes(config, columns, pass_tiles) > SHARED_BYTES:
            pass_tiles //= 2
        spec, shared = SKINNY, _skinny_shared_bytes(config, columns, pass_tiles)
        sizes["DTYPE"] = dtype
        sizes["W_TILES"], sizes["X_TILES"] = config.tile, x_tiles
        sizes["X_SLOTS"] = min(steps, max(_TILES_IN_FLIGHT // x_tiles, 1))
        sizes["PASS_TILES"] = pass_tiles
    else:
        spec, shared = SKINNY_ROW, config.groups * config.k_warps * columns * FLOAT_BYTES
        sizes["LANES"] = config.tile
    return spec.specialise(
        threads=config.threads,
        static_shared_bytes=shared,
        reason=relative(config.reason),
        W_ALONG_K=cpp_bool(along_k),
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        OUT=out,
        **sizes,
    )


def relative(reason: str) -> str:
    """Append to a reason with speeds what they are relative to."""
    return f"{reason}, relative to reading the weight alone" if "0." in reason else reason


def _skinny_shared_bytes(config: SkinnyConfig, columns: int, pass_tiles: int) -> int:
    """Count all warps' sums of some rows, and a bias a column (asserted in product.cu's Smem)."""
    sums = config.k_warps * pass_tiles * _LANE_ITEMS * (columns + 4)
    return config.groups * (sums + columns) * FLOAT_BYTES


_MERGE_THREADS = 128


@cache
def merge(dtype: str, activation: str | None, gated: bool) -> Specialisation:
    """Specialise the kernel that adds the splits of K."""
    return SKINNY_MERGE.specialise(
        threads=_MERGE_THREADS,
        reason="adds the splits of K, always in the same order",
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield every configuration with vector and scalar loads and its longest burst."""
    vec = vector_items("float16")
    for along_k, by_rows in rows_for(CONFIGURATIONS, arch).items():
        for limit, by_columns in by_rows.items():
            for config in by_columns.values():
                longest = SkinnyKernel(
                    config, along_k, vec, limit // _LANE_ITEMS, max(config.steps)
                )
                yield skinny(longest, (None, False, "float16"))
                yield skinny(longest._replace(vec=1, steps=1), ("silu", True, "float16"))
    yield skinny(SkinnyKernel(config, False, vec, 8, 1), (None, False, "float32"))
    if arch >= NATIVE_ARCH:
        yield from _bfloat16_catalogue(arch)
    for activation in STRUCTS:
        yield merge("float16", activation, activation is not None)


def _bfloat16_catalogue(arch: int) -> Iterator[Specialisation]:
    """Yield what bfloat16 adds: the kernels for several rows, with either accesses."""
    dtype = "bfloat16"
    for along_k, by_rows in rows_for(CONFIGURATIONS, arch).items():
        for limit, by_columns in by_rows.items():
            for config in by_columns.values() if limit > 1 else ():
                kernel = SkinnyKernel(config, along_k, 1, limit // _LANE_ITEMS, 1, dtype)
                yield skinny(kernel, ("silu", True, dtype))
                vec, steps = vector_items(dtype), max(config.steps)
                yield skinny(kernel._replace(vec=vec, steps=steps), (None, False, dtype))
                yield skinny(kernel._replace(vec=vec, steps=steps), (None, False, "float32"))
    yield merge(dtype, "gelu", False)


def product_steps(
    draft: ForwardDraft,
    product: Specialisation,
    operands: tuple[int | None, ...],
    *,
    ctas: int,
    splits: int,
) -> tuple[Step, ...]:
    """Return the launch of a product, and with a split K the launch that adds the splits.

    `operands` are the slots of x and of the weight's arrays, as the kernel takes them.
    """
    problem, slots = draft.problem, draft.slots
    epilogue = (slots.b, slots.residual, slots.preactivation, slots.out)
    if splits == 1:
        return (Step.of(product, ctas, (*operands, *epilogue), skinny_params(problem)),)
    draft.traits.choices.because(f"columns are too few to fill the GPU: K is split {splits} ways")
    sums = skinny_params(problem, splits=splits, outer=problem.weight_columns)
    sums["out_stride"] = problem.weight_columns
    partials = draft.planner.scratch(splits * problem.rows * problem.weight_columns)
    return (
        Step.of(product, ctas, (*operands, None, None, None, partials), sums),
        Step.of(
            merge(problem.dtype.name, problem.scalar_activation, problem.gated),
            -(-problem.rows * problem.outer // _MERGE_THREADS),
            (partials, *epilogue),
            skinny_params(problem, splits=splits),
        ),
    )


def skinny_params(
    problem: ForwardProblem, *, splits: int = 1, outer: int | None = None
) -> np.ndarray:
    """Fill the C struct ThinParams; rows of a quantised weight are contiguous."""
    params = new_struct(SKINNY_PARAMS)
    for name in ("x", "residual", "preactivation", "out"):
        matrix = getattr(problem, name)
        if matrix is not None:
            params[f"{name}_stride"] = matrix.leading
    if problem.weight is None:
        params["w_stride"] = problem.w.leading
    params["rows"], params["inner"] = problem.rows, problem.inner
    params["outer"], params["splits"] = outer or problem.outer, splits
    return params


_MOST = (MAX_ROWS, 2**27, 2**30)
"""Maximum of M, K and N: kernels count bursts times splits of K, and columns, in 32 bits."""


def _takes(problem: ForwardProblem) -> bool:
    sizes = (problem.rows, problem.inner, problem.outer)
    return all(size <= most for size, most in zip(sizes, _MOST, strict=True))


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan the forward."""
    problem, traits = draft.problem, draft.traits
    launch = skinny_launch(
        traits.arch,
        traits.multiprocessors,
        _vector(problem),
        along_k=not problem.w.along_columns,
        rows=problem.rows,
        inner=problem.inner,
        outer=problem.outer,
        gated=problem.gated,
        choices=traits.choices,
    )
    kernel = launch.kernel._replace(dtype=problem.dtype.name)
    product = skinny(kernel, product_epilogue(problem, launch.splits))
    ctas, operands = launch.splits * launch.tiles, (draft.slots.x, draft.slots.w)
    return product_steps(draft, product, operands, ctas=ctas, splits=launch.splits)


def _vector(problem: ForwardProblem) -> int:
    """Return 8 if all loads of x and w may have 16 bytes, otherwise 1."""
    w = problem.w
    halves = [w.columns_from(n, problem.outer).vector for n in range(0, w.columns, problem.outer)]
    whole = vector_items(problem.dtype.name)
    return whole if min(problem.vector(problem.x), *halves) == whole else 1


def _is_row(problem: ForwardProblem) -> bool:
    """Tell whether the kernel for one row takes a problem; it does not use tensor cores."""
    return problem.rows == 1 and _takes(problem)


def _takes_rows(problem: ForwardProblem) -> bool:
    """Tell whether the kernels on tensor cores take a problem of several rows."""
    return problem.rows > 1 and _takes(problem)


_REASON = READS_ONCE.format(most=MAX_ROWS)
PLANS: Plans = (
    LinearPlan("forward", ("float16",), _forward_steps, _REASON, _is_row),
    LinearPlan("forward", HALVES, _forward_steps, _REASON, _takes_rows, tensor_cores=True),
)
