"""Products in float32 arithmetic, for every storage dtype: kernels, configurations and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cupyattn.ops.linear.problem import (
    IN_FLOAT32,
    READS_ONCE,
    STRUCTS,
    BackwardDraft,
    ForwardDraft,
    ForwardProblem,
    LinearPlan,
    LinearProblem,
    Matrix,
    Plans,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.plan import Step
from cupyattn.runtime.row_kernel import COLUMN_SUMS_COLUMNS, column_sums
from cupyattn.runtime.spec import (
    Gates,
    KernelSpec,
    Pointer,
    Specialisation,
    StructParameter,
    inputs,
)
from cupyattn.runtime.storage import STORAGE, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs, rows_for

# FloatProductParams in cuda_src/linear/float32/product.cuh
FLOAT_PRODUCT_PARAMS = np.dtype(
    [
        *(
            (f"{array}_stride", np.int64)
            for array in ("a", "b", "preactivation", "residual", "result")
        ),
        *((field, np.int64) for field in ("rows", "columns", "depth", "half", "accumulate")),
    ],
    align=True,
)
FLOAT_PRODUCT_STRUCT = StructParameter("params", FLOAT_PRODUCT_PARAMS, "FloatProductParams")

FORWARD = KernelSpec(
    "linear_forward_f32",
    "linear/float32/forward.cu",
    (
        *(*inputs("x", "w"), *inputs("b", "residual", optional=True)),
        *(Pointer("out"), Pointer("preactivation", optional=True)),
        FLOAT_PRODUCT_STRUCT,
    ),
)
SKINNY = KernelSpec("linear_thin_f32", "linear/float32/skinny.cu", FORWARD.parameters)
DX = KernelSpec(
    "linear_dx_f32",
    "linear/float32/dx.cu",
    (
        *(*inputs("dout", "w"), *inputs("preactivation", optional=True)),
        Pointer("dx"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
DW = KernelSpec(
    "linear_dw_f32",
    "linear/float32/dw.cu",
    (
        *(*inputs("x", "dout"), *inputs("preactivation", optional=True)),
        Pointer("dw"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
DB = KernelSpec(
    "linear_db_f32",
    "linear/float32/db.cu",
    (
        *(*inputs("dout"), *inputs("preactivation", optional=True)),
        Pointer("partials"),
        FLOAT_PRODUCT_STRUCT,
    ),
)
KERNELS = (FORWARD, SKINNY, DX, DW, DB)

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that Turing's tensor cores do not take, and float16 for devices without them."""
OUT_VECTOR = 4
"""Items of one load or store of the epilogue, if rows are aligned to as many."""
SKINNY_ROWS = (1, 2, 4, 8, 16)
"""Rows of x that the skinny kernel is compiled for."""
SKINNY_COLUMNS = 32
"""Columns of w that a skinny CTA computes."""
_SKINNY_WARPS = 8

DB_THREADS = 64
DB_CTAS = 512
"""CTAs that a launch aims for: rows are summed by many at once."""

_SM_SHARED_BYTES = 64 * 1024
_WARP_ROWS, _WARP_COLUMNS = 32, 64  # kWarpRows and kWarpColumns in product.cuh


@dataclass(frozen=True)
class FloatTileConfig:
    """The tile of a CTA: 8 x 8 sums a thread, 32 rows by 64 columns a warp."""

    tile_m: int
    tile_n: int
    ctas_per_sm: int
    reason: str

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.tile_m // _WARP_ROWS * (self.tile_n // _WARP_COLUMNS) * WARP_SIZE


_GATES = Gates(
    models=0.96, options=0.9
)  # of the float32 units, in every product and both configurations
_FEW = FloatTileConfig(64, 64, 4, "four times as many CTAs for results of few tiles")

# A result takes the first configuration of which it has as many tiles as the key, else the last.
_Configs = Mapping[int, FloatTileConfig]
PRODUCTS: Mapping[int, _Configs] = {
    75: {
        80: FloatTileConfig(128, 64, 3, "168 registers hold the sums and the loads in flight"),
        0: _FEW,
    }
}
# For results whose rows are those of a factor that is computed as it is loaded: each item of that
# factor is used by 128 lines of the other.
GRADIENT_PRODUCTS: Mapping[int, _Configs] = {
    75: {80: FloatTileConfig(64, 128, 3, "the tile of the other products, transposed"), 0: _FEW}
}


def product_config(
    arch: int, rows: int, columns: int, table: Mapping[int, _Configs] = PRODUCTS
) -> FloatTileConfig:
    """Return the configuration for a result of these sizes."""
    for least, config in rows_for(table, arch).items():
        if -(-rows // config.tile_m) * -(-columns // config.tile_n) >= least:
            return config
    raise AssertionError("the last configuration takes everything")


@cache
def skinny(
    dtype: str, rows: int, w_along: str, activation: str | None, gated: bool, vec: int
) -> Specialisation:
    """Specialise the skinny forward for one of `SKINNY_ROWS`; w_along is that of `forward`."""
    parts = _SKINNY_WARPS if w_along == "kLines" else 1
    return SKINNY.specialise(
        threads=_SKINNY_WARPS * WARP_SIZE,
        static_shared_bytes=parts * rows * SKINNY_COLUMNS * FLOAT_BYTES,
        reason=f"for at most {rows} rows of x; bound by the bytes of w in flight",
        DTYPE=dtype,
        ROWS=rows,
        MIN_CTAS=2 if rows < SKINNY_ROWS[-1] else 1,
        W_ALONG=w_along,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
    )


@cache
def specialise_tile(
    spec: KernelSpec,
    dtype: str,
    config: FloatTileConfig,
    activation: str | None,
    gated: bool,
    vec: int,
    vec_out: int,
    own_bytes: int = 0,
    **more: Any,
) -> Specialisation:
    """Specialise a kernel of linear; `own_bytes` and others as in `float_tile`."""
    return float_tile(
        spec,
        dtype,
        config,
        own_bytes,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
        VEC_OUT=vec_out,
        **more,
    )


def float_tile(
    spec: KernelSpec,
    dtype: str,
    config: FloatTileConfig,
    own_bytes: int = 0,
    **macros: Any,
) -> Specialisation:
    """Specialise a kernel that includes product.cuh and has `own_bytes` more of shared memory."""
    depth = 2 * vector_items(dtype)
    shared_bytes = 2 * depth * (config.tile_m + config.tile_n) * FLOAT_BYTES + own_bytes
    return spec.specialise(
        threads=config.threads,
        static_shared_bytes=shared_bytes,
        gates=_GATES,
        reason=config.reason,
        DTYPE=dtype,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        MIN_CTAS=min(config.ctas_per_sm, _SM_SHARED_BYTES // shared_bytes),
        **macros,
    )


@cache
def db(dtype: str, activation: str | None, gated: bool, vec: int) -> Specialisation:
    """Specialise the kernel that computes partial sums of db."""
    return DB.specialise(
        threads=DB_THREADS,
        gates=Gates(registers=240),
        reason="parts of the rows are summed by many CTAs at once",
        DTYPE=dtype,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        VEC=vec,
    )


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield configurations, dtypes, directions, activations and loads in pairs."""
    kinds = ((None, False), ("gelu", False), ("gelu_tanh", False), ("relu", False), ("silu", True))
    ways, sizes, whole_or_not = (True, False), range(2), (True, False)
    for dtype, size, lines, kind, whole, whole_out in pairs(
        DTYPES, sizes, ways, kinds, whole_or_not, whole_or_not
    ):
        vec, vec_out = vector_items(dtype) if whole else 1, OUT_VECTOR if whole_out else 1
        along = "kLines" if lines else "kDepth"
        tables = {FORWARD: PRODUCTS, DX: GRADIENT_PRODUCTS}
        for spec, table in tables.items():
            config = nth_config(table, arch, size)
            yield specialise_tile(spec, dtype, config, *kind, vec, vec_out, W_ALONG=along)
        config = nth_config(GRADIENT_PRODUCTS if lines else PRODUCTS, arch, size)
        yield specialise_tile(DW, dtype, config, *kind, vec, vec_out, TRANSPOSED=cpp_bool(lines))
    of_rows = tuple(zip(SKINNY_ROWS, kinds, strict=True))
    for dtype, (rows, (activation, gated)), lines, whole in pairs(
        DTYPES, of_rows, ways, whole_or_not
    ):
        along, vec = "kLines" if lines else "kDepth", vector_items(dtype) if whole else 1
        yield skinny(dtype, rows, along, activation, gated, vec)
    for dtype, (activation, gated), whole in pairs(DTYPES, kinds, whole_or_not):
        yield db(dtype, activation, gated, vector_items(dtype) if whole else 1)


def nth_config(table: Mapping[int, _Configs], arch: int, index: int) -> FloatTileConfig:
    """Return the configuration of a table at an index."""
    return tuple(rows_for(table, arch).values())[index]


def specialise_for(
    spec: KernelSpec,
    problem: LinearProblem,
    config: FloatTileConfig,
    vec: int,
    vec_out: int,
    own_bytes: int = 0,
    **more: Any,
) -> Specialisation:
    """Specialise a kernel that includes product.cuh for the dtype and activation of a problem."""
    kind = (problem.scalar_activation, problem.gated)
    dtype = problem.dtype.name
    return specialise_tile(spec, dtype, config, *kind, vec, vec_out, own_bytes, **more)


def forward_params(problem: ForwardProblem) -> np.ndarray:
    """Fill the C struct FloatProductParams of a forward."""
    return float_params(
        a=problem.x,
        b=problem.w,
        result=problem.out,
        preactivation=problem.preactivation,
        residual=problem.residual,
        depth=problem.inner,
    )


def forward_step(
    draft: ForwardDraft,
    spec: KernelSpec,
    weight: tuple[int | None, ...],
    vec: int,
    passed: Callable[[np.ndarray], np.ndarray] = lambda params: params,
    own_bytes: int = 0,
    **macros: Any,
) -> Step:
    """Plan out and preactivation by a kernel that takes the slots `weight` in place of w."""
    problem, slots = draft.problem, draft.slots
    config = product_config(draft.traits.arch, problem.rows, problem.weight_columns)
    results = (problem.b, problem.residual, problem.out, problem.preactivation)
    kernel = specialise_for(
        spec,
        problem,
        config,
        vec,
        whole(problem, *results, items=OUT_VECTOR),
        own_bytes,
        **macros,
        W_ALONG="kLines" if problem.w.along_columns else "kDepth",
    )
    columns = config.tile_n // 2 if problem.gated else config.tile_n
    ctas = -(-problem.rows // config.tile_m) * -(-problem.outer // columns)
    arrays = (slots.x, *weight, slots.b, slots.residual, slots.out, slots.preactivation)
    return Step.of(kernel, ctas, arrays, passed(forward_params(problem)))


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan out and preactivation: one launch."""
    vec = whole(draft.problem, draft.problem.x, draft.problem.w)
    return (forward_step(draft, FORWARD, (draft.slots.w,), vec),)


def _skinny_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan out and preactivation of few rows: one launch that reads the weight once."""
    problem, slots = draft.problem, draft.slots
    kernel = skinny(
        problem.dtype.name,
        next(rows for rows in SKINNY_ROWS if problem.rows <= rows),
        "kLines" if problem.w.along_columns else "kDepth",
        problem.scalar_activation,
        problem.gated,
        whole(problem, problem.x, problem.w),
    )
    columns = SKINNY_COLUMNS // (2 if problem.gated else 1)
    arrays = (slots.x, slots.w, slots.b, slots.residual, slots.out, slots.preactivation)
    return (Step.of(kernel, -(-problem.outer // columns), arrays, forward_params(problem)),)


def _is_skinny(problem: ForwardProblem) -> bool:
    return problem.rows <= SKINNY_ROWS[-1]


def dx_step(
    draft: BackwardDraft,
    spec: KernelSpec,
    weight: tuple[int | None, ...],
    vec: int,
    passed: Callable[[np.ndarray], np.ndarray] = lambda params: params,
    own_bytes: int = 0,
    **macros: Any,
) -> Step:
    """Plan dx by a kernel that takes the slots `weight` in place of w."""
    problem, slots = draft.problem, draft.slots
    config = product_config(draft.traits.arch, problem.rows, problem.inner, GRADIENT_PRODUCTS)
    kernel = specialise_for(
        spec,
        problem,
        config,
        vec,
        whole(problem, problem.dx, items=OUT_VECTOR),
        own_bytes,
        **macros,
        W_ALONG="kDepth" if problem.w.along_columns else "kLines",
    )
    params = float_params(
        a=problem.dout,
        b=problem.w,
        result=problem.dx,
        preactivation=problem.preactivation,
        depth=problem.weight_columns,
        half=problem.half,
        accumulate=problem.accumulate,
    )
    ctas = -(-problem.rows // config.tile_m) * -(-problem.inner // config.tile_n)
    arrays = (slots.dout, *weight, slots.preactivation, slots.dx)
    return Step.of(kernel, ctas, arrays, passed(params))


def _dx_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dx: one launch."""
    problem = draft.problem
    vec = whole(problem, problem.dout, problem.w, problem.preactivation)
    return (dx_step(draft, DX, (draft.slots.w,), vec),)


def _dw_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dw, in one launch, and db, in two more."""
    problem, slots, result = draft.problem, draft.slots, draft.problem.dw
    assert result is not None
    transposed = not result.along_columns
    result = result.transposed if transposed else result
    after = db_steps(draft)
    if problem.inner == 0:
        return after
    table = GRADIENT_PRODUCTS if transposed else PRODUCTS
    config = product_config(draft.traits.arch, result.rows, result.columns, table)
    kernel = specialise_for(
        DW,
        problem,
        config,
        whole(problem, problem.x, problem.dout, problem.preactivation),
        whole(problem, problem.dw, items=OUT_VECTOR),
        TRANSPOSED=cpp_bool(transposed),
    )
    params = float_params(
        a=problem.x,
        b=problem.dout,
        result=result,
        preactivation=problem.preactivation,
        depth=problem.rows,
        half=problem.half,
        accumulate=problem.accumulate,
    )
    ctas = -(-result.rows // config.tile_m) * -(-result.columns // config.tile_n)
    arrays = (slots.x, slots.dout, slots.preactivation, slots.dw)
    return (Step.of(kernel, ctas, arrays, params), *after)


def db_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan db, if there is a bias: sums of parts of the rows, and the sum of these."""
    problem, slots, dtype = draft.problem, draft.slots, draft.problem.dtype.name
    if not problem.biased:
        return ()
    width = problem.weight_columns
    column_tiles = -(-width // (DB_THREADS * vector_items(dtype)))
    parts = max(min(-(-DB_CTAS // column_tiles), -(-problem.rows // 8)), 1)
    part_rows = -(-problem.rows // parts)
    parts = -(-problem.rows // part_rows)
    kernel = db(
        dtype,
        problem.scalar_activation,
        problem.gated,
        whole(problem, problem.dout, problem.preactivation),
    )
    params = float_params(
        a=problem.dout,
        b=problem.dout,
        result=Matrix(problem.rows, width, width, 1, 4, 0),
        preactivation=problem.preactivation,
        depth=part_rows,
        half=problem.half,
    )
    partials = draft.planner.scratch(parts * width)
    return (
        Step.of(kernel, parts * column_tiles, (slots.dout, slots.preactivation, partials), params),
        Step.of(
            column_sums(dtype),
            -(-width // COLUMN_SUMS_COLUMNS),
            (partials, None, slots.db, None),
            *(parts, width, problem.accumulate),
        ),
    )


def whole(problem: LinearProblem, *matrices: Matrix | None, items: int | None = None) -> int:
    """Return `items`, by default 16 bytes' worth, if all lines are whole vectors of them, or 1.

    It is 1 too where a vector may have items of both halves of a gated weight.
    """
    items = items or vector_items(problem.dtype.name)
    halves = not problem.gated or problem.outer % items == 0
    return items if problem.vector(*matrices) >= items and halves else 1


def float_params(
    *,
    a: Matrix,
    b: Matrix,
    result: Matrix,
    depth: int,
    preactivation: Matrix | None = None,
    residual: Matrix | None = None,
    half: int = 0,
    accumulate: bool = False,
) -> np.ndarray:
    """Fill the C struct FloatProductParams."""
    params = new_struct(FLOAT_PRODUCT_PARAMS)
    params["a_stride"], params["b_stride"] = a.leading, b.leading
    params["result_stride"] = result.leading
    if preactivation is not None:
        params["preactivation_stride"] = preactivation.leading
    if residual is not None:
        params["residual_stride"] = residual.leading
    params["rows"], params["columns"] = result.rows, result.columns
    params["depth"], params["half"], params["accumulate"] = depth, half, accumulate
    return params[()]


_SKINNY_REASON = READS_ONCE.format(most=SKINNY_ROWS[-1])
FEW_ROWS: Plans = (
    LinearPlan("forward", tuple(STORAGE), _skinny_steps, _SKINNY_REASON, _is_skinny),
)
PLANS: Plans = (
    LinearPlan("forward", tuple(STORAGE), _forward_steps, IN_FLOAT32),
    LinearPlan("dx", tuple(STORAGE), _dx_steps, IN_FLOAT32),
    LinearPlan("dw", tuple(STORAGE), _dw_steps, IN_FLOAT32),
)
