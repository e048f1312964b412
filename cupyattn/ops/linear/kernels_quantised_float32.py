"""Products of a quantised weight in float32 arithmetic: kernels, configurations and plans.

For dtypes that Turing's tensor cores do not take, and for float16 on devices without tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from cupyattn.ops.linear import kernels_float32 as float32
from cupyattn.ops.linear.kernels_float32 import (
    FLOAT_PRODUCT_PARAMS,
    FLOAT_PRODUCT_STRUCT,
)
from cupyattn.ops.linear.kernels_quantised import CODEBOOK_BYTES, FORMAT_STRUCTS, row_blocks
from cupyattn.ops.linear.kernels_quantised_skinny import PRODUCT as ON_TENSOR_CORES
from cupyattn.ops.linear.kernels_quantised_skinny import streams
from cupyattn.ops.linear.kernels_skinny import skinny_params
from cupyattn.ops.linear.problem import (
    IN_FLOAT32,
    READS_ONCE,
    STRUCTS,
    BackwardDraft,
    ForwardDraft,
    ForwardProblem,
    LinearPlan,
    LinearProblem,
    Plans,
)
from cupyattn.runtime.arch import TURING, WARP_SIZE
from cupyattn.runtime.plan import Step
from cupyattn.runtime.spec import KernelSpec, Pointer, Specialisation, StructParameter, inputs
from cupyattn.runtime.storage import STORAGE, VECTOR_BYTES, vector_items
from cupyattn.runtime.structs import new_struct
from cupyattn.runtime.tables import FLOAT_BYTES, cpp_bool, pairs

# QuantisedFloatParams in cuda_src/linear/quantised/float_operand.cuh
QUANTISED_FLOAT_PARAMS = np.dtype(
    [
        ("product", FLOAT_PRODUCT_PARAMS),
        *((field, np.int32) for field in ("blocks", "block_log2")),
    ],
    align=True,
)
QUANTISED_FLOAT_STRUCT = StructParameter(
    "params", QUANTISED_FLOAT_PARAMS, "QuantisedFloatParams", (FLOAT_PRODUCT_STRUCT,)
)

_WEIGHT = (*inputs("codes", "scales"), *inputs("super_scales", optional=True))

FORWARD = KernelSpec(
    "linear_forward_quantised_f32",
    "linear/quantised/float_forward.cu",
    (
        *inputs("x"),
        *_WEIGHT,
        *inputs("b", "residual", optional=True),
        *(Pointer("out"), Pointer("preactivation", optional=True)),
        QUANTISED_FLOAT_STRUCT,
    ),
)
DX = KernelSpec(
    "linear_dx_quantised_f32",
    "linear/quantised/float_dx.cu",
    (
        *inputs("dout"),
        *_WEIGHT,
        *inputs("preactivation", optional=True),
        Pointer("dx"),
        QUANTISED_FLOAT_STRUCT,
    ),
)
SKINNY = KernelSpec(
    "linear_quantised_thin_f32", "linear/quantised/thin_float32.cu", ON_TENSOR_CORES.parameters
)
KERNELS = (FORWARD, DX, SKINNY)


# A GTX 1650 Ti needs 8 bytes of codes a cycle of a multiprocessor; decoding and products of one row
# take about five instructions a weight, and with 16 warps that is about what there is.
SKINNY_ROWS = (1, 2, 4, 8)
"""Rows of x that the skinny kernel is compiled for."""
MAX_SKINNY_ROWS = 16
"""Maximum of skinny rows: for more, the tiles dequantise less often."""
X_VECTOR = 4
"""Items of x of one vector load."""
_WARPS = 8
_COLUMNS = 4  # of a warp


def skinny_ctas(rows: int, outer: int, gated: bool) -> int:
    """Return the grid of a skinny product."""
    results = _WARPS * _COLUMNS // (1 + gated)
    return -(-rows // _tile_rows(rows)) * -(-outer // results)


def _tile_rows(rows: int) -> int:
    return next((most for most in SKINNY_ROWS if rows <= most), max(SKINNY_ROWS))


def skinny(
    weights: str,
    block_size: int,
    dtype: str,
    vec: int,
    rows: int,
    activation: str | None,
    gated: bool,
) -> Specialisation:
    """Specialise the skinny kernel; block_size is 0 for "int8" blocks that are whole rows."""
    return _skinny(weights, block_size, dtype, vec, _tile_rows(rows), activation, gated)


@cache
def _skinny(
    weights: str,
    block_size: int,
    dtype: str,
    vec: int,
    rows: int,
    activation: str | None,
    gated: bool,
) -> Specialisation:
    run_items = WARP_SIZE * VECTOR_BYTES * (1 if weights == "int8" else 2)
    return SKINNY.specialise(
        threads=_WARPS * WARP_SIZE,
        static_shared_bytes=rows * run_items * FLOAT_BYTES,
        reason=f"{rows} rows of x for each weight that is decoded; 16 warps on a multiprocessor",
        FORMAT=FORMAT_STRUCTS[weights],
        BLOCK_SIZE=block_size,
        DTYPE=dtype,
        VEC=vec,
        ACTIVATION=STRUCTS[activation],
        GATED=cpp_bool(gated),
        ROWS=rows,
        COLUMNS=_COLUMNS,
        MIN_CTAS=2,
    )


_BLOCKS = (("nf4", 64), ("int4", 128), ("int8", 0), ("int8", 32), ("q4_1", 32), ("q4_k", 32))


def catalogue(arch: int = TURING.number) -> Iterator[Specialisation]:
    """Yield formats, configurations, dtypes, directions, activations and loads in pairs."""
    kinds = ((None, False), ("gelu", False), ("relu", False), ("silu", True))
    for name, dtype, size, along, (activation, gated), whole in pairs(
        FORMAT_STRUCTS, float32.DTYPES, range(2), ("kDepth", "kLines"), kinds, (True, False)
    ):
        vec, vec_out = (vector_items(dtype), float32.OUT_VECTOR) if whole else (1, 1)
        options = (activation, gated, vec, vec_out, CODEBOOK_BYTES.get(name, 0))
        macros = {"FORMAT": FORMAT_STRUCTS[name], "W_ALONG": along}
        tables = {FORWARD: float32.PRODUCTS, DX: float32.GRADIENT_PRODUCTS}
        for spec, table in tables.items():
            config = float32.nth_config(table, arch, size)
            yield float32.specialise_tile(spec, dtype, config, *options, **macros)
    skinny_kinds = ((None, False), ("gelu", False), ("silu", True))
    for (weights, block_size), dtype, rows, (activation, gated), vec in pairs(
        _BLOCKS, tuple(STORAGE), SKINNY_ROWS, skinny_kinds, (1, X_VECTOR)
    ):
        yield _skinny(weights, block_size, dtype, vec, rows, activation, gated)


def _forward_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan out and preactivation: one launch."""
    problem, slots = draft.problem, draft.slots
    config = float32.product_config(draft.traits.arch, problem.rows, problem.weight_columns)
    kernel = float32.specialise_for(
        FORWARD,
        problem,
        config,
        float32.whole_halves(problem, problem.x),
        float32.result_vector(problem),
        CODEBOOK_BYTES.get(problem.quantised.format, 0),
        FORMAT=FORMAT_STRUCTS[problem.quantised.format],
        W_ALONG="kLines" if problem.w.along_columns else "kDepth",
    )
    arrays = (
        *(slots.x, slots.codes, slots.scales, slots.super_scales),
        *(slots.b, slots.residual, slots.out, slots.preactivation),
    )
    params = _passed(float32.forward_params(problem), problem)
    return (Step.of(kernel, float32.forward_ctas(problem, config), arrays, params),)


def _dx_steps(draft: BackwardDraft) -> tuple[Step, ...]:
    """Plan dx: one launch."""
    problem, slots = draft.problem, draft.slots
    config = float32.product_config(
        draft.traits.arch, problem.rows, problem.inner, float32.GRADIENT_PRODUCTS
    )
    kernel = float32.specialise_for(
        DX,
        problem,
        config,
        float32.whole_halves(problem, problem.dout, problem.preactivation),
        float32.whole_out(problem, problem.dx),
        CODEBOOK_BYTES.get(problem.quantised.format, 0),
        FORMAT=FORMAT_STRUCTS[problem.quantised.format],
        W_ALONG="kDepth" if problem.w.along_columns else "kLines",
    )
    arrays = (
        *(slots.dout, slots.codes, slots.scales, slots.super_scales),
        *(slots.preactivation, slots.dx),
    )
    params = _passed(float32.dx_params(problem), problem)
    return (Step.of(kernel, float32.dx_ctas(problem, config), arrays, params),)


def _passed(params: np.ndarray, problem: LinearProblem) -> np.ndarray:
    """Return the C struct QuantisedFloatParams."""
    own, blocks = new_struct(QUANTISED_FLOAT_PARAMS), row_blocks(problem)
    own["product"], own["blocks"], own["block_log2"] = params, blocks.blocks, blocks.block_log2
    return own[()]


def _takes_skinny(problem: ForwardProblem) -> bool:
    return problem.rows <= MAX_SKINNY_ROWS and streams(problem)


def _skinny_steps(draft: ForwardDraft) -> tuple[Step, ...]:
    """Plan out and preactivation of few rows: one launch."""
    problem, slots, weight = draft.problem, draft.slots, draft.problem.quantised
    whole = weight.format == "int8" and weight.block_size == problem.inner
    kernel = skinny(
        weight.format,
        0 if whole else weight.block_size,
        problem.dtype.name,
        X_VECTOR if problem.vector(problem.x) >= X_VECTOR else 1,
        problem.rows,
        problem.scalar_activation,
        problem.gated,
    )
    ctas = skinny_ctas(problem.rows, problem.outer, problem.gated)
    arrays = (
        *(slots.x, slots.codes, slots.scales, slots.super_scales),
        *(slots.b, slots.residual, slots.preactivation, slots.out),
    )
    return (Step.of(kernel, ctas, arrays, skinny_params(problem)),)


_SKINNY_REASON = READS_ONCE.format(most=MAX_SKINNY_ROWS)
PLANS: Plans = (
    LinearPlan("forward", tuple(STORAGE), _skinny_steps, _SKINNY_REASON, _takes_skinny),
    LinearPlan("forward", tuple(STORAGE), _forward_steps, IN_FLOAT32),
    LinearPlan("dx", tuple(STORAGE), _dx_steps, IN_FLOAT32),
    LinearPlan("db", tuple(STORAGE), float32.db_steps, IN_FLOAT32),
)
