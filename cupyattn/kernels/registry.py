"""Every kernel of the library: its spec, and the C structs that it takes by value.

A struct here and its C twin are held together by the size, which every source asserts, and by a
test that reads each field back from a kernel.
"""

from __future__ import annotations

import numpy as np

from cupyattn.kernels.spec import KernelSpec, Pointer, Struct

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

_FLASH_PARAMETERS = (
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
        SOFTMAX_FORWARD,
        SOFTMAX_BACKWARD,
    )
}
