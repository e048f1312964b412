"""The C structs that kernels take by value, as NumPy dtypes.

A struct here and its C twin are held together by the size, which every source asserts, and by a
test that reads each field back from a kernel.
"""

from __future__ import annotations

import numpy as np

from cupyattn.kernels.spec import Struct

OUTER_AXES = 4
"""Axes before the last that a row-wise kernel can walk, after merging (kOuterAxes in rows.cuh)."""

UNBOUNDED = 1 << 62
"""A window side without a limit (kUnbounded in masks.cuh)."""

ELEMENTS_AXES = 4
"""Axes before the rows that an element-wise kernel can walk (kElementsAxes in elements.cuh)."""

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
        *((field, np.int32) for field in ("first_batch", "first_query")),
        ("first_counter", np.uint32),
    ],
    align=True,
)

# AttentionParams in cuda_src/attention/params.cuh
ATTENTION_PARAMS = np.dtype(
    [
        *((array, _STRIDES) for array in ("q", "k", "v", "out", "lse")),
        *((array, _BATCH_INTEGERS) for array in ("q_offsets", "seqused_k")),
        *(
            (field, np.int64)
            for field in ("q_offset", "offset_least", "offset_most", "left", "right")
        ),
        *((field, np.int32) for field in ("heads", "group", "sq", "sk")),
        *((field, np.float32) for field in ("scale_log2", "softmax_scale")),
        ("scores", _SCORE_PARAMS),
        *((field, np.int32) for field in ("together", "kv_together")),
    ],
    align=True,
)

# SplitParams in cuda_src/attention/key_parts.cuh
SPLIT_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((field, np.int32) for field in ("splits", "least_keys", "batch")),
    ],
    align=True,
)

# DecodeParams in cuda_src/attention/decode/params.cuh
DECODE_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((array, _STRIDES) for array in ("k_scales", "v_scales")),
        *((f"table_{axis}", np.int64) for axis in ("batch", "block")),
        *((field, np.int32) for field in ("batch", "kv_heads", "block_tiles", "row_tiles", "ctas")),
    ],
    align=True,
)

_CACHE_UNITS = np.dtype([(field, np.int32) for field in ("bytes", "block", "group")], align=True)

_SCALE_LAYOUT = np.dtype(
    [
        ("head", np.int64),
        *((field, np.int32) for field in ("token", "block_groups")),
        ("units", _CACHE_UNITS),
    ],
    align=True,
)

# PagedParams in cuda_src/attention/paged_params.cuh
PAGED_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        ("cu_seqlens_q", _BATCH_INTEGERS),
        ("table_batch", np.int64),
        *((field, np.int32) for field in ("table_block", "batch", "total")),
        ("block_reciprocal", np.uint32),
        *((field, np.int32) for field in ("block_shift", "block_span")),
        ("units", _CACHE_UNITS),
        ("scales", _SCALE_LAYOUT),
    ],
    align=True,
)

_PACKED_BATCH = np.dtype(
    [
        *((f"cu_seqlens_{side}", _BATCH_INTEGERS) for side in ("q", "k")),
        *((field, np.int32) for field in ("batch", "total_q", "total_k", "ends_with_keys")),
    ],
    align=True,
)

# VarlenParams in cuda_src/attention/varlen_params.cuh
VARLEN_PARAMS = np.dtype(
    [("attention", ATTENTION_PARAMS), ("packed", _PACKED_BATCH)],
    align=True,
)

# MergeParams in cuda_src/attention/merge.cu
MERGE_PARAMS = np.dtype(
    [
        *((array, _STRIDES) for array in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")),
        ("rows", np.int64),
        *((field, np.int32) for field in ("heads", "seq", "dim")),
    ],
    align=True,
)

_SLOT_STRIDES = np.dtype([(axis, np.int64) for axis in ("outer", "inner", "head")], align=True)

# AppendParams in cuda_src/kv_cache/append.cu
APPEND_PARAMS = np.dtype(
    [
        *(
            (array, _SLOT_STRIDES)
            for array in ("q", "k", "v", "k_cache", "v_cache", "k_scales", "v_scales")
        ),
        *(
            (f"{array}_{axis}", np.int64)
            for array in ("slots", "positions")
            for axis in ("batch", "seq")
        ),
        *((field, np.int64) for field in ("cos_stride", "sin_stride", "table_length", "slots")),
        *((field, np.uint32) for field in ("tokens", "seq", "heads", "groups", "kv_heads")),
        *((field, np.uint32) for field in ("kv_groups", "half", "dim", "block_size")),
    ],
    align=True,
)

COPY_ARRAYS = 4
"""Arrays that one launch of copy_blocks takes."""
COPY_AXES = 4
"""Axes of a block's words (kCopyAxes in copy_blocks.cu)."""
COPIES_PASSED = 32
"""Copies that a launch is passed by value (kPassed in copy_blocks.cu)."""

# CopyBlocksParams in cuda_src/kv_cache/copy_blocks.cu
COPY_BLOCKS_PARAMS = np.dtype(
    [
        ("block_stride", np.int64, (COPY_ARRAYS,)),
        ("strides", np.int64, (COPY_ARRAYS, COPY_AXES)),
        *((field, np.int64) for field in ("copy_stride", "end_stride", "copies")),
        ("shape", np.uint32, (COPY_ARRAYS, COPY_AXES)),
        ("first_thread", np.uint32, (COPY_ARRAYS + 1,)),
        ("num_blocks", np.int32),
        ("passed", np.int32),
        *((end, np.int32, (COPIES_PASSED,)) for end in ("src", "dst")),
    ],
    align=True,
)

# GatherParams in cuda_src/kv_cache/gather.cu
GATHER_PARAMS = np.dtype(
    [
        *(
            (array, _SLOT_STRIDES)
            for array in ("k_cache", "v_cache", "k_scales", "v_scales", "k", "v")
        ),
        *((field, np.int64) for field in ("table_batch", "table_block", "seqlens_stride")),
        *((field, np.uint32) for field in ("tokens", "length", "heads", "units", "block_size")),
        *((field, np.int32) for field in ("num_blocks", "max_blocks")),
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

# VarlenBackwardParams in cuda_src/attention/varlen_backward_params.cuh
VARLEN_BACKWARD_PARAMS = np.dtype(
    [("backward", BACKWARD_PARAMS), ("packed", _PACKED_BATCH)],
    align=True,
)

# DbiasParams in cuda_src/attention/tensor_core/backward_dbias.cu
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

NORM_ARRAYS = 8
"""Arrays that one launch of norm_partials takes."""

# NormParams in cuda_src/layers/norm_partials.cu
NORM_PARAMS = np.dtype(
    [
        *((field, np.int64, (NORM_ARRAYS,)) for field in ("length", "stride", "units", "rows")),
        ("first_cta", np.uint32, (NORM_ARRAYS + 1,)),
        ("first_partial", np.uint32),
    ],
    align=True,
)

# SampleParams in cuda_src/layers/sampling.cuh
SAMPLE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("logits_stride", "previous_stride", "previous_step")),
        *(
            (f"{option}_stride", np.int64)
            for option in (
                "seed",
                "step",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
            )
        ),
        *((field, np.int32) for field in ("vocabulary", "width", "parts")),
        *((f"{option}_is_int64", np.int32) for option in ("step", "top_k")),
    ],
    align=True,
)

# RopeParams in cuda_src/layers/rope.cu
ROPE_PARAMS = np.dtype(
    [
        *((array, _STRIDES, (2,)) for array in ("x", "out")),
        *((f"{table}_stride", np.int64) for table in ("cos", "sin")),
        *((f"positions_{axis}", np.int64) for axis in ("batch", "seq")),
        ("table_length", np.int64),
        *((field, np.uint32) for field in ("tokens", "seq")),
        *((field, np.uint32, (2,)) for field in ("heads", "groups")),
        *((field, np.uint32) for field in ("slots", "rotated_slots", "half", "dim")),
        ("sign", np.float32),
    ],
    align=True,
)

# RotaryParams in cuda_src/attention/rotary.cuh
ROTARY_PARAMS = np.dtype(
    [
        *((array, _STRIDES, (2,)) for array in ("x", "out")),
        *((field, np.int64) for field in ("cos_stride", "sin_stride", "table_length")),
        ("query_threads", np.uint32),
        *((field, np.uint32, (2,)) for field in ("tokens", "heads", "groups")),
        *((field, np.uint32) for field in ("slots", "rotated_slots", "half", "dim")),
        ("sign", np.float32),
    ],
    align=True,
)

# RotaryTables in cuda_src/attention/tensor_core/rotated_chunks.cuh
ROTARY_TABLES = np.dtype(
    [(field, np.int64) for field in ("cos_stride", "sin_stride", "length", "half")], align=True
)

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

# QuantisedFloatParams in cuda_src/linear/quantised/float_operand.cuh
QUANTISED_FLOAT_PARAMS = np.dtype(
    [
        ("product", FLOAT_PRODUCT_PARAMS),
        *((field, np.int32) for field in ("blocks", "block_log2")),
    ],
    align=True,
)

# ThinParams in cuda_src/linear/thin/tile.cuh
THIN_PARAMS = np.dtype(
    [
        *(
            (f"{array}_stride", np.int64)
            for array in ("x", "w", "residual", "preactivation", "out")
        ),
        *((size, np.int32) for size in ("rows", "inner", "outer", "splits")),
    ],
    align=True,
)

# ProductParams in cuda_src/linear/tensor_core/params.cuh
PRODUCT_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("a", "b", "preactivation", "out", "addend")),
        *((field, np.int32) for field in ("rows", "columns", "inner", "split_inner")),
        *((field, np.int32) for field in ("group_log2", "splits_log2", "column_tiles")),
        ("column_tiles_reciprocal", np.uint32),
    ],
    align=True,
)

# QuantisedTileParams in cuda_src/linear/quantised/tile_feed.cuh
QUANTISED_TILE_PARAMS = np.dtype(
    [("product", PRODUCT_PARAMS), *((field, np.int32) for field in ("blocks", "block_log2"))],
    align=True,
)

# PreactivationGradientParams in cuda_src/linear/tensor_core/preactivation_gradient.cu
PREACTIVATION_GRADIENT_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("dout", "preactivation")),
        *((field, np.int32) for field in ("rows", "columns", "block_rows", "column_blocks")),
    ],
    align=True,
)


def rows_params(arrays: int) -> np.dtype:
    """RowsParams<arrays> in cuda_src/common/rows.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (OUTER_AXES,)),
            ("strides", np.int64, (arrays, OUTER_AXES)),
            ("rows", np.int64),
            ("length", np.int64),
        ],
        align=True,
    )


# QuantizeParams in cuda_src/linear/quantised/quantize.cu
QUANTIZE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("inner_stride", "outer_stride")),
        *((field, np.uint32) for field in ("outer", "blocks", "block_size")),
    ],
    align=True,
)

# DequantizeParams in cuda_src/linear/quantised/dequantize.cu
DEQUANTIZE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("inner_stride", "outer_stride")),
        *((field, np.uint32) for field in ("outer", "units", "block_size")),
    ],
    align=True,
)


def elements_params(arrays: int) -> np.dtype:
    """ElementsParams<arrays> in cuda_src/common/elements.cuh."""
    return np.dtype(
        [
            ("shape", np.int64, (ELEMENTS_AXES,)),
            ("strides", np.int64, (arrays, ELEMENTS_AXES)),
            ("offsets", np.int64, (arrays,)),
            ("length", np.int64),
            ("rows", np.uint32),
            ("units", np.uint32),
        ],
        align=True,
    )


ATTENTION_STRUCT = Struct("params", ATTENTION_PARAMS, "AttentionParams")
BACKWARD_STRUCT = Struct("params", BACKWARD_PARAMS, "BackwardParams", (ATTENTION_STRUCT,))
SPLIT_STRUCT = Struct("params", SPLIT_PARAMS, "SplitParams", (ATTENTION_STRUCT,))
DECODE_STRUCT = Struct("params", DECODE_PARAMS, "DecodeParams", (ATTENTION_STRUCT,))
PAGED_STRUCT = Struct("params", PAGED_PARAMS, "PagedParams", (ATTENTION_STRUCT,))
VARLEN_STRUCT = Struct("params", VARLEN_PARAMS, "VarlenParams", (ATTENTION_STRUCT,))
VARLEN_BACKWARD_STRUCT = Struct(
    "params",
    VARLEN_BACKWARD_PARAMS,
    "VarlenBackwardParams",
    (BACKWARD_STRUCT, VARLEN_STRUCT),
)
MERGE_STRUCT = Struct("params", MERGE_PARAMS, "MergeParams", (ATTENTION_STRUCT,))
APPEND_STRUCT = Struct("params", APPEND_PARAMS, "AppendParams")
COPY_BLOCKS_STRUCT = Struct("params", COPY_BLOCKS_PARAMS, "CopyBlocksParams")
GATHER_STRUCT = Struct("params", GATHER_PARAMS, "GatherParams")
NORM_STRUCT = Struct("params", NORM_PARAMS, "NormParams")
SAMPLE_STRUCT = Struct("params", SAMPLE_PARAMS, "SampleParams")
ROPE_STRUCT = Struct("params", ROPE_PARAMS, "RopeParams")
ROTARY_STRUCT = Struct("rotary", ROTARY_PARAMS, "RotaryParams")
ROTARY_TABLES_STRUCT = Struct("tables", ROTARY_TABLES, "RotaryTables")
FLOAT_PRODUCT_STRUCT = Struct("params", FLOAT_PRODUCT_PARAMS, "FloatProductParams")
QUANTISED_FLOAT_STRUCT = Struct(
    "params", QUANTISED_FLOAT_PARAMS, "QuantisedFloatParams", (FLOAT_PRODUCT_STRUCT,)
)
THIN_STRUCT = Struct("params", THIN_PARAMS, "ThinParams")
PRODUCT_STRUCT = Struct("params", PRODUCT_PARAMS, "ProductParams")
QUANTISED_TILE_STRUCT = Struct(
    "params", QUANTISED_TILE_PARAMS, "QuantisedTileParams", (PRODUCT_STRUCT,)
)
PREACTIVATION_GRADIENT_STRUCT = Struct(
    "params", PREACTIVATION_GRADIENT_PARAMS, "PreactivationGradientParams"
)
QUANTIZE_STRUCT = Struct("params", QUANTIZE_PARAMS, "QuantizeParams")
DEQUANTIZE_STRUCT = Struct("params", DEQUANTIZE_PARAMS, "DequantizeParams")
DBIAS_STRUCT = Struct("params", DBIAS_PARAMS, "DbiasParams", (ATTENTION_STRUCT,))


def rows_struct(arrays: int) -> Struct:
    """RowsParams of that many arrays, as a parameter."""
    return Struct("params", rows_params(arrays), "RowsParams")


def elements_struct(arrays: int) -> Struct:
    """ElementsParams of that many arrays, as a parameter."""
    return Struct("params", elements_params(arrays), "ElementsParams")
