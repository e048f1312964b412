"""The structs of attention's kernels."""

from __future__ import annotations

import numpy as np

from cupyattn.runtime.spec import StructParameter
from cupyattn.runtime.structs import TOKEN_STRIDES

UNBOUNDED = 1 << 62
"""A window side without a limit (kUnbounded in masks.cuh)."""

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
        *((array, TOKEN_STRIDES) for array in ("q", "k", "v", "out", "lse")),
        *((array, _BATCH_INTEGERS) for array in ("q_offsets", "seqused_k")),
        *(
            (field, np.int64)
            for field in ("q_offset", "offset_least", "offset_most", "left", "right")
        ),
        *((field, np.int32) for field in ("heads", "group", "sq", "sk")),
        *((field, np.float32) for field in ("scale_log2", "softmax_scale")),
        ("scores", _SCORE_PARAMS),
        *((field, np.int32) for field in ("together", "kv_together", "batches")),
    ],
    align=True,
)
ATTENTION_STRUCT = StructParameter("params", ATTENTION_PARAMS, "AttentionParams")

# SplitParams in cuda_src/attention/key_parts.cuh
SPLIT_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((field, np.int32) for field in ("splits", "least_keys", "batch")),
    ],
    align=True,
)
SPLIT_STRUCT = StructParameter("params", SPLIT_PARAMS, "SplitParams", (ATTENTION_STRUCT,))

# DecodeParams in cuda_src/attention/decode/params.cuh
DECODE_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((array, TOKEN_STRIDES) for array in ("k_scales", "v_scales")),
        *((f"table_{axis}", np.int64) for axis in ("batch", "block")),
        *((field, np.int32) for field in ("batch", "kv_heads", "block_tiles", "row_tiles", "ctas")),
    ],
    align=True,
)
DECODE_STRUCT = StructParameter("params", DECODE_PARAMS, "DecodeParams", (ATTENTION_STRUCT,))

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
PAGED_STRUCT = StructParameter("params", PAGED_PARAMS, "PagedParams", (ATTENTION_STRUCT,))

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
VARLEN_STRUCT = StructParameter("params", VARLEN_PARAMS, "VarlenParams", (ATTENTION_STRUCT,))

# BackwardParams in cuda_src/attention/backward_params.cuh
BACKWARD_PARAMS = np.dtype(
    [
        ("attention", ATTENTION_PARAMS),
        *((array, TOKEN_STRIDES) for array in ("dout", "dlse", "dq", "dk", "dv")),
        ("dbias", _SCORE_STRIDES),
        *((field, np.int64) for field in ("dsinks_stride", "zeroed")),
        *((field, np.int32) for field in ("batch", "rows_padded", "accumulate")),
        ("scale", np.float32),
    ],
    align=True,
)
BACKWARD_STRUCT = StructParameter("params", BACKWARD_PARAMS, "BackwardParams", (ATTENTION_STRUCT,))

# VarlenBackwardParams in cuda_src/attention/varlen_backward_params.cuh
VARLEN_BACKWARD_PARAMS = np.dtype(
    [("backward", BACKWARD_PARAMS), ("packed", _PACKED_BATCH)],
    align=True,
)
VARLEN_BACKWARD_STRUCT = StructParameter(
    "params",
    VARLEN_BACKWARD_PARAMS,
    "VarlenBackwardParams",
    (BACKWARD_STRUCT, VARLEN_STRUCT),
)

# TeachingParams in cuda_src/attention/teaching/naive.cu and tiled.cu
TEACHING_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES) for array in ("q", "k", "v", "out", "lse")),
        *((field, np.int32) for field in ("heads", "group", "sq", "sk", "causal")),
        ("softmax_scale", np.float32),
    ],
    align=True,
)
TEACHING_STRUCT = StructParameter("params", TEACHING_PARAMS, "TeachingParams")

# TeachingBackwardParams in cuda_src/attention/teaching/naive_backward.cu
TEACHING_BACKWARD_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES) for array in ("dout", "q", "k", "v", "out", "lse", "dlse")),
        *((array, TOKEN_STRIDES) for array in ("dq", "dk", "dv")),
        *((field, np.int32) for field in ("batch", "heads", "group", "sq", "sk")),
        *((field, np.int32) for field in ("causal", "accumulate")),
        ("softmax_scale", np.float32),
    ],
    align=True,
)
TEACHING_BACKWARD_STRUCT = StructParameter(
    "params", TEACHING_BACKWARD_PARAMS, "TeachingBackwardParams"
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
DBIAS_STRUCT = StructParameter("params", DBIAS_PARAMS, "DbiasParams", (ATTENTION_STRUCT,))

# MergeParams in cuda_src/attention/merge.cu
MERGE_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES) for array in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")),
        ("rows", np.int64),
        *((field, np.int32) for field in ("heads", "seq", "dim")),
    ],
    align=True,
)
MERGE_STRUCT = StructParameter("params", MERGE_PARAMS, "MergeParams", (ATTENTION_STRUCT,))

# RotaryParams in cuda_src/attention/rotary.cuh
ROTARY_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES, (2,)) for array in ("x", "out")),
        *((field, np.int64) for field in ("cos_stride", "sin_stride", "table_length")),
        ("query_threads", np.uint32),
        *((field, np.uint32, (2,)) for field in ("tokens", "heads", "groups")),
        *((field, np.uint32) for field in ("slots", "rotated_slots", "half", "dim")),
        ("sign", np.float32),
    ],
    align=True,
)
ROTARY_STRUCT = StructParameter("rotary", ROTARY_PARAMS, "RotaryParams")

# RotaryTables in cuda_src/attention/tensor_core/rotated_chunks.cuh
ROTARY_TABLES = np.dtype(
    [(field, np.int64) for field in ("cos_stride", "sin_stride", "length", "half")], align=True
)
ROTARY_TABLES_STRUCT = StructParameter("tables", ROTARY_TABLES, "RotaryTables")
