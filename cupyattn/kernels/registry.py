"""Every kernel of the library: its spec, and the C structs that it takes by value.

A struct here and its C twin are held together by the size, which every source asserts, and by a
test that reads each field back from a kernel.
"""

from __future__ import annotations

import numpy as np

from cupyattn.kernels.spec import KernelSpec, Parameter, Pointer, Struct

OUTER_AXES = 4
"""Axes before the last that a row-wise kernel can walk, after merging (kOuterAxes in rows.cuh)."""

UNBOUNDED = 1 << 62
"""A window side without a limit (kUnbounded in mask.cuh)."""

_STRIDES = np.dtype([("batch", np.int64), ("seq", np.int64), ("head", np.int64)], align=True)
_BATCH_INTEGERS = np.dtype([("stride", np.int64), ("is_int64", np.int64)], align=True)

_SCORE_STRIDES = np.dtype(
    [(axis, np.int64) for axis in ("batch", "head", "row", "key")], align=True
)
_SCORE_PARAMS = np.dtype(
    [
        *((array, _SCORE_STRIDES) for array in ("bias", "mask")),
        *((field, np.int64) for field in ("slopes_batch", "slopes_head", "sinks_stride")),
        ("seed", np.uint64),
        ("keep_from", np.uint32),
        *((field, np.float32) for field in ("keep_scale", "softcap_in", "softcap")),
    ],
    align=True,
)

# AttentionParams in cuda_src/attention/params.cuh
ATTENTION_PARAMS = np.dtype(
    [
        *((array, _STRIDES) for array in ("q", "k", "v", "out", "lse")),
        *((array, _BATCH_INTEGERS) for array in ("q_offsets", "seqused_k")),
        *((field, np.int64) for field in ("q_offset", "left", "right")),
        *((field, np.int32) for field in ("heads", "group", "sq", "sk")),
        *((field, np.float32) for field in ("scale_log2", "softmax_scale")),
        ("scores", _SCORE_PARAMS),
    ],
    align=True,
)

# BackwardParams in cuda_src/attention/backward_params.cuh
BACKWARD_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((array, _STRIDES) for array in ("dout", "dlse", "dq", "dk", "dv")),
        ("dbias", _SCORE_STRIDES),
        *((field, np.int64) for field in ("dsinks_stride", "zeroed")),
        *((field, np.int32) for field in ("batch", "rows_padded", "accumulate")),
        ("scale", np.float32),
    ],
    align=True,
)

# DbiasParams in cuda_src/attention/backward_dbias.cu
DBIAS_PARAMS = np.dtype(
    [
        ("shape", np.int64, (4,)),
        ("repeats", np.int64, (4,)),
        ("source", _SCORE_STRIDES),
        ("target", _SCORE_STRIDES),
        ("accumulate", np.int64),
    ],
    align=True,
)


def rows_params(arrays: int) -> np.dtype:
    """RowsParams<arrays> in cuda_src/fused/rows.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (OUTER_AXES,)),
            ("strides", np.int64, (arrays, OUTER_AXES)),
            ("rows", np.int64),
            ("length", np.int64),
        ],
        align=True,
    )


_ATTENTION_PARAMETERS = (
    Pointer("q", const=True),
    Pointer("k", const=True),
    Pointer("v", const=True),
    Pointer("out"),
    Pointer("lse", optional=True),
    Pointer("q_offset", const=True, optional=True),
    Pointer("seqused_k", const=True, optional=True),
    Struct("params", ATTENTION_PARAMS),
)

ATTENTION_NAIVE = KernelSpec(
    entry="attention_naive",
    source="attention/naive.cu",
    parameters=_ATTENTION_PARAMETERS,
    macros=("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "THREADS", "SHARED_BYTES", "PARAMS_BYTES"),
)

ATTENTION_TILED = KernelSpec(
    entry="attention_tiled",
    source="attention/tiled.cu",
    parameters=_ATTENTION_PARAMETERS,
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
    *_ATTENTION_PARAMETERS[:-1],
    *(
        Pointer(name, const=True, optional=True)
        for name in ("bias", "mask", "alibi_slopes", "sinks")
    ),
    _ATTENTION_PARAMETERS[-1],
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

_BACKWARD_STRUCTS = ("PARAMS_BYTES", "BACKWARD_PARAMS_BYTES")
_GRADIENT_OPTIONS = ("BIAS", "MASK", "SLOPES", "SOFTCAP", "DROPOUT", "DBIAS", "DBIAS_ADD")
_OPTIONAL_INPUTS = tuple(
    Pointer(name, const=True, optional=True)
    for name in ("q_offset", "seqused_k", "bias", "mask", "alibi_slopes")
)
_NAIVE_MACROS = (
    *("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "THREADS"),
    *_GRADIENT_OPTIONS[:-2],
    *_BACKWARD_STRUCTS,
)
_BACKWARD_STRUCT = Struct("params", BACKWARD_PARAMS)


def _constants(*names: str) -> tuple[Pointer, ...]:
    return tuple(Pointer(name, const=True) for name in names)


_DKDV_PARAMETERS: tuple[Parameter, ...] = (
    *(Pointer(name, const=True) for name in ("q", "k", "v", "dout", "stats")),
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
        *(Pointer(name, const=True) for name in ("out", "dout", "lse")),
        Pointer("dlse", const=True, optional=True),
        Pointer("stats"),
        Pointer("zeroed", optional=True),
        _BACKWARD_STRUCT,
    ),
    macros=("HEAD_DIM_V", "THREADS", "ROW_LANES", "VEC", *_BACKWARD_STRUCTS),
)

ATTENTION_BACKWARD_DKDV = KernelSpec(
    entry="attention_backward_dkdv",
    source="attention/backward_dkdv.cu",
    parameters=_DKDV_PARAMETERS,
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "M_TILES", "WARPS", "TILE_Q", "SUB_Q", "DQ_ROW_WARPS"),
        *("ONE_PASS", "VEC", "MIN_CTAS", "SHARED_BYTES"),
        *_BACKWARD_STRUCTS,
        *_GRADIENT_OPTIONS,
    ),
)

ATTENTION_BACKWARD_DKDV_PAIRED = KernelSpec(
    entry="attention_backward_dkdv_paired",
    source="attention/backward_dkdv_paired.cu",
    parameters=_DKDV_PARAMETERS,
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "WARPS", "TILE_Q", "ONE_PASS", "VEC", "MIN_CTAS"),
        "SHARED_BYTES",
        *_BACKWARD_STRUCTS,
        *_GRADIENT_OPTIONS,
    ),
)

ATTENTION_BACKWARD_CONVERT = KernelSpec(
    entry="attention_backward_convert",
    source="attention/backward_convert.cu",
    parameters=(Pointer("dq_acc", const=True), Pointer("dq"), _BACKWARD_STRUCT),
    macros=("HEAD_DIM", "THREADS", "VEC", *_BACKWARD_STRUCTS),
)

ATTENTION_BACKWARD_DQ = KernelSpec(
    entry="attention_backward_dq",
    source="attention/backward_dq.cu",
    parameters=(
        *(Pointer(name, const=True) for name in ("q", "k", "v", "dout", "stats")),
        Pointer("dq"),
        *_OPTIONAL_INPUTS,
        _BACKWARD_STRUCT,
    ),
    macros=(
        *("HEAD_DIM", "HEAD_DIM_V", "M_TILES", "WARPS", "TILE_K", "VEC", "MIN_CTAS"),
        "SHARED_BYTES",
        *_BACKWARD_STRUCTS,
        *_GRADIENT_OPTIONS[:-2],
    ),
)

ATTENTION_BACKWARD_DBIAS = KernelSpec(
    entry="attention_backward_dbias",
    source="attention/backward_dbias.cu",
    parameters=(
        Pointer("scratch", const=True),
        Pointer("dbias"),
        Struct("params", DBIAS_PARAMS),
    ),
    macros=("DTYPE", "THREADS", "DBIAS_PARAMS_BYTES", "PARAMS_BYTES"),
)

ATTENTION_BACKWARD_DSINKS = KernelSpec(
    entry="attention_backward_dsinks",
    source="attention/backward_dsinks.cu",
    parameters=(
        Pointer("sinks", const=True),
        Pointer("stats", const=True),
        Pointer("dsinks"),
        _BACKWARD_STRUCT,
    ),
    macros=("DTYPE", "THREADS", *_BACKWARD_STRUCTS),
)

_FLOAT_MACROS = (
    *("DTYPE", "HEAD_DIM", "HEAD_DIM_V", "TILE_Q", "TILE_K", "VEC", "MIN_CTAS", "SHARED_BYTES"),
    *_GRADIENT_OPTIONS[:-2],
    *_BACKWARD_STRUCTS,
)

ATTENTION_BACKWARD_F32_DELTA = KernelSpec(
    entry="attention_backward_f32_delta",
    source="attention/backward_f32_delta.cu",
    parameters=(
        *_constants("dout", "out"),
        Pointer("dlse", const=True, optional=True),
        Pointer("delta"),
        _BACKWARD_STRUCT,
    ),
    macros=("DTYPE", "HEAD_DIM_V", "THREADS", *_BACKWARD_STRUCTS),
)

ATTENTION_BACKWARD_F32_DKDV = KernelSpec(
    entry="attention_backward_f32_dkdv",
    source="attention/backward_f32_dkdv.cu",
    parameters=(
        *_constants("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        *(Pointer("dk"), Pointer("dv"), Pointer("dbias", optional=True)),
        _BACKWARD_STRUCT,
    ),
    macros=(*_FLOAT_MACROS, "DBIAS"),
)

ATTENTION_BACKWARD_F32_DQ = KernelSpec(
    entry="attention_backward_f32_dq",
    source="attention/backward_f32_dq.cu",
    parameters=(
        *_constants("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        Pointer("dq"),
        _BACKWARD_STRUCT,
    ),
    macros=_FLOAT_MACROS,
)

ATTENTION_BACKWARD_NAIVE_DQ = KernelSpec(
    entry="attention_backward_naive_dq",
    source="attention/backward_naive_dq.cu",
    parameters=(
        *_constants("dout", "q", "k", "v", "out", "lse"),
        Pointer("dlse", const=True, optional=True),
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
        *_constants("dout", "q", "k", "v", "lse", "delta"),
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
        *_constants("dout", "q", "k", "v", "lse", "delta"),
        *_OPTIONAL_INPUTS,
        Pointer("dbias"),
        _BACKWARD_STRUCT,
    ),
    macros=(*_NAIVE_MACROS, "LANES"),
)

ATTENTION_BACKWARD_NAIVE_DSINKS = KernelSpec(
    entry="attention_backward_naive_dsinks",
    source="attention/backward_naive_dsinks.cu",
    parameters=(*_constants("lse", "delta", "sinks"), Pointer("dsinks"), _BACKWARD_STRUCT),
    macros=("SINKS", "THREADS", *_BACKWARD_STRUCTS),
)

_ROW_MACROS = ("DTYPE", "THREADS", "LANES", "STRIPS", "VEC", "RESIDENT", "PARAMS_BYTES")

SOFTMAX_FORWARD = KernelSpec(
    entry="softmax_forward",
    source="fused/softmax_forward.cu",
    parameters=(Pointer("x", const=True), Pointer("out"), Struct("params", rows_params(2))),
    macros=_ROW_MACROS,
)

SOFTMAX_BACKWARD = KernelSpec(
    entry="softmax_backward",
    source="fused/softmax_backward.cu",
    parameters=(
        Pointer("dout", const=True),
        Pointer("out", const=True),
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
