"""Every kernel of the library: its source, parameters and macros."""

from __future__ import annotations

from cupyattn.kernels.spec import KernelSpec, Parameter, Pointer, Struct
from cupyattn.kernels.structs import ATTENTION_PARAMS, BACKWARD_PARAMS, DBIAS_PARAMS, rows_params


def _inputs(*names: str, optional: bool = False) -> tuple[Pointer, ...]:
    return tuple(Pointer(name, const=True, optional=optional) for name in names)


_ATTENTION_POINTERS = (
    *_inputs("q", "k", "v"),
    Pointer("out"),
    Pointer("lse", optional=True),
    *_inputs("q_offset", "seqused_k", optional=True),
)
_ATTENTION_STRUCT = Struct("params", ATTENTION_PARAMS)

ATTENTION_NAIVE = KernelSpec(
    entry="attention_naive",
    source="attention/naive.cu",
    parameters=(*_ATTENTION_POINTERS, _ATTENTION_STRUCT),
    macros=("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "THREADS", "SHARED_BYTES", "PARAMS_BYTES"),
)

ATTENTION_TILED = KernelSpec(
    entry="attention_tiled",
    source="attention/tiled.cu",
    parameters=(*_ATTENTION_POINTERS, _ATTENTION_STRUCT),
    macros=(
        "DTYPE",
        "HEAD_DIM",
        "HEAD_DIM_V",
        "WARPS",
        "ROWS",
        "VEC",
        "MIN_CTAS",
        "SHARED_BYTES",
        "PARAMS_BYTES",
    ),
)

_FLASH_PARAMETERS: tuple[Parameter, ...] = (
    *_ATTENTION_POINTERS,
    *_inputs("bias", "mask", "alibi_slopes", "sinks", optional=True),
    _ATTENTION_STRUCT,
)
_OPTION_MACROS = ("BIAS", "BIAS_VEC", "MASK", "MASK_VEC", "SLOPES", "SOFTCAP", "SINKS", "DROPOUT")

ATTENTION_FORWARD = KernelSpec(
    entry="attention_forward",
    source="attention/forward.cu",
    parameters=_FLASH_PARAMETERS,
    macros=(
        "HEAD_DIM",
        "HEAD_DIM_V",
        "M_TILES",
        "WARPS",
        "TILE_K",
        "VEC",
        "MIN_CTAS",
        "SHARED_BYTES",
        "PARAMS_BYTES",
        *_OPTION_MACROS,
    ),
)

ATTENTION_FORWARD_F32 = KernelSpec(
    entry="attention_forward_f32",
    source="attention/forward_f32.cu",
    parameters=_FLASH_PARAMETERS,
    macros=(
        "DTYPE",
        "HEAD_DIM",
        "HEAD_DIM_V",
        "WARPS",
        "COLUMN_LANES",
        "PAIRS",
        "VEC",
        "MIN_CTAS",
        "SHARED_BYTES",
        "PARAMS_BYTES",
        *_OPTION_MACROS,
    ),
)

_BACKWARD_BYTES = ("PARAMS_BYTES", "BACKWARD_PARAMS_BYTES")
_SCORE_MACROS = ("BIAS", "MASK", "SLOPES", "SOFTCAP", "DROPOUT")
_DBIAS_MACROS = ("DBIAS", "DBIAS_ADD", "DBIAS_ACCUMULATE")
_OPTIONAL_INPUTS = _inputs("q_offset", "seqused_k", "bias", "mask", "alibi_slopes", optional=True)
_BACKWARD_STRUCT = Struct("params", BACKWARD_PARAMS)

_DKDV_PARAMETERS: tuple[Parameter, ...] = (
    *_inputs("q", "k", "v", "dout", "stats"),
    Pointer("dq_acc", optional=True),
    Pointer("dk"),
    Pointer("dv"),
    Pointer("dbias", optional=True),
    *_OPTIONAL_INPUTS,
    _BACKWARD_STRUCT,
)

ATTENTION_BACKWARD_DELTA = KernelSpec(
    entry="attention_backward_delta",
    source="attention/backward_delta.cu",
    parameters=(
        *_inputs("out", "dout", "lse"),
        *_inputs("dlse", optional=True),
        Pointer("stats"),
        Pointer("zeroed", optional=True),
        _BACKWARD_STRUCT,
    ),
    macros=("HEAD_DIM_V", "THREADS", "ROW_LANES", "VEC", *_BACKWARD_BYTES),
)

ATTENTION_BACKWARD_DKDV = KernelSpec(
    entry="attention_backward_dkdv",
    source="attention/backward_dkdv.cu",
    parameters=_DKDV_PARAMETERS,
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "M_TILES", "WARPS", "TILE_Q", "SUB_Q", "DQ_ROW_WARPS"),
        *("ONE_PASS", "VEC", "MIN_CTAS", "SHARED_BYTES"),
        *_BACKWARD_BYTES,
        "SCORE_VEC",
        *_SCORE_MACROS,
        *_DBIAS_MACROS,
    ),
)

ATTENTION_BACKWARD_DKDV_PAIRED = KernelSpec(
    entry="attention_backward_dkdv_paired",
    source="attention/backward_dkdv_paired.cu",
    parameters=_DKDV_PARAMETERS,
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "WARPS", "TILE_Q", "ONE_PASS", "VEC", "MIN_CTAS"),
        "SHARED_BYTES",
        *_BACKWARD_BYTES,
        "SCORE_VEC",
        *_SCORE_MACROS,
        *_DBIAS_MACROS,
    ),
)

ATTENTION_BACKWARD_CONVERT = KernelSpec(
    entry="attention_backward_convert",
    source="attention/backward_convert.cu",
    parameters=(*_inputs("dq_acc"), Pointer("dq"), _BACKWARD_STRUCT),
    macros=("HEAD_DIM", "THREADS", "VEC", *_BACKWARD_BYTES),
)

ATTENTION_BACKWARD_DQ = KernelSpec(
    entry="attention_backward_dq",
    source="attention/backward_dq.cu",
    parameters=(
        *_inputs("q", "k", "v", "dout", "stats"),
        Pointer("dq"),
        *_OPTIONAL_INPUTS,
        _BACKWARD_STRUCT,
    ),
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "M_TILES", "WARPS", "TILE_K", "FULL_LOOP", "VEC", "MIN_CTAS"),
        "SHARED_BYTES",
        *_BACKWARD_BYTES,
        "SCORE_VEC",
        *_SCORE_MACROS,
    ),
)

ATTENTION_BACKWARD_DBIAS = KernelSpec(
    entry="attention_backward_dbias",
    source="attention/backward_dbias.cu",
    parameters=(
        *_inputs("scratch"),
        Pointer("dbias"),
        Struct("params", DBIAS_PARAMS),
    ),
    macros=("DTYPE", "THREADS", "DBIAS_PARAMS_BYTES", "PARAMS_BYTES"),
)

ATTENTION_BACKWARD_DSINKS = KernelSpec(
    entry="attention_backward_dsinks",
    source="attention/backward_dsinks.cu",
    parameters=(
        *_inputs("sinks", "stats"),
        Pointer("dsinks"),
        _BACKWARD_STRUCT,
    ),
    macros=("DTYPE", "THREADS", *_BACKWARD_BYTES),
)

_FLOAT_MACROS = (
    *("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "TILE_Q", "TILE_K", "THREAD_ROWS", "VEC", "MIN_CTAS"),
    "SHARED_BYTES",
    *_SCORE_MACROS,
    *_BACKWARD_BYTES,
)

ATTENTION_BACKWARD_F32_DELTA = KernelSpec(
    entry="attention_backward_f32_delta",
    source="attention/backward_f32_delta.cu",
    parameters=(
        *_inputs("dout", "out"),
        *_inputs("dlse", optional=True),
        Pointer("delta"),
        _BACKWARD_STRUCT,
    ),
    macros=("DTYPE", "HEAD_DIM_V", "THREADS", *_BACKWARD_BYTES),
)

ATTENTION_BACKWARD_F32_DKDV = KernelSpec(
    entry="attention_backward_f32_dkdv",
    source="attention/backward_f32_dkdv.cu",
    parameters=(
        *_inputs("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        *(Pointer("dq"), Pointer("dk"), Pointer("dv"), Pointer("dbias", optional=True)),
        _BACKWARD_STRUCT,
    ),
    macros=(*_FLOAT_MACROS, "ONE_PASS", "DBIAS"),
)

ATTENTION_BACKWARD_F32_DQ = KernelSpec(
    entry="attention_backward_f32_dq",
    source="attention/backward_f32_dq.cu",
    parameters=(
        *_inputs("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        Pointer("dq"),
        _BACKWARD_STRUCT,
    ),
    macros=_FLOAT_MACROS,
)

_NAIVE_MACROS = (
    *("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "THREADS"),
    *_SCORE_MACROS,
    *_BACKWARD_BYTES,
)

ATTENTION_BACKWARD_NAIVE_DQ = KernelSpec(
    entry="attention_backward_naive_dq",
    source="attention/backward_naive_dq.cu",
    parameters=(
        *_inputs("dout", "q", "k", "v", "out", "lse"),
        *_inputs("dlse", optional=True),
        *_OPTIONAL_INPUTS,
        *(Pointer("delta"), Pointer("dq")),
        _BACKWARD_STRUCT,
    ),
    macros=(*_NAIVE_MACROS, "SHARED_BYTES"),
)

ATTENTION_BACKWARD_NAIVE_DKDV = KernelSpec(
    entry="attention_backward_naive_dkdv",
    source="attention/backward_naive_dkdv.cu",
    parameters=(
        *_inputs("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        *(Pointer("dk"), Pointer("dv")),
        _BACKWARD_STRUCT,
    ),
    macros=(*_NAIVE_MACROS, "SHARED_BYTES"),
)

ATTENTION_BACKWARD_NAIVE_DBIAS = KernelSpec(
    entry="attention_backward_naive_dbias",
    source="attention/backward_naive_dbias.cu",
    parameters=(
        *_inputs("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        Pointer("dbias"),
        _BACKWARD_STRUCT,
    ),
    macros=(*_NAIVE_MACROS, "LANES"),
)

ATTENTION_BACKWARD_NAIVE_DSINKS = KernelSpec(
    entry="attention_backward_naive_dsinks",
    source="attention/backward_naive_dsinks.cu",
    parameters=(*_inputs("lse", "delta", "sinks"), Pointer("dsinks"), _BACKWARD_STRUCT),
    macros=("SINKS", "THREADS", *_BACKWARD_BYTES),
)

_ROW_MACROS = ("DTYPE", "THREADS", "LANES", "STRIPS", "VEC", "RESIDENT", "PARAMS_BYTES")

SOFTMAX_FORWARD = KernelSpec(
    entry="softmax_forward",
    source="fused/softmax_forward.cu",
    parameters=(*_inputs("x"), Pointer("out"), Struct("params", rows_params(2))),
    macros=_ROW_MACROS,
)

SOFTMAX_BACKWARD = KernelSpec(
    entry="softmax_backward",
    source="fused/softmax_backward.cu",
    parameters=(
        *_inputs("dout", "out"),
        Pointer("dx"),
        Struct("params", rows_params(3)),
    ),
    macros=_ROW_MACROS,
)

KERNELS = {
    spec.entry: spec
    for spec in (
        ATTENTION_NAIVE,
        ATTENTION_TILED,
        ATTENTION_FORWARD,
        ATTENTION_FORWARD_F32,
        ATTENTION_BACKWARD_F32_DELTA,
        ATTENTION_BACKWARD_F32_DKDV,
        ATTENTION_BACKWARD_F32_DQ,
        ATTENTION_BACKWARD_NAIVE_DQ,
        ATTENTION_BACKWARD_NAIVE_DKDV,
        ATTENTION_BACKWARD_NAIVE_DBIAS,
        ATTENTION_BACKWARD_NAIVE_DSINKS,
        ATTENTION_BACKWARD_DELTA,
        ATTENTION_BACKWARD_DKDV,
        ATTENTION_BACKWARD_DKDV_PAIRED,
        ATTENTION_BACKWARD_DQ,
        ATTENTION_BACKWARD_CONVERT,
        ATTENTION_BACKWARD_DBIAS,
        ATTENTION_BACKWARD_DSINKS,
        SOFTMAX_FORWARD,
        SOFTMAX_BACKWARD,
    )
}
