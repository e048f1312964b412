"""The structs of attention's kernels, and how they are filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyattn.runtime.spec import StructParameter
from cupyattn.runtime.structs import TOKEN_STRIDES, new_struct

UNBOUNDED = 1 << 62
"""A window side without a limit (kUnbounded in masks.cuh)."""


def filled(dtype: np.dtype, **fields: Any) -> Any:
    """Return a struct with these fields; raise ValueError for an integer that does not fit one."""
    struct = new_struct(dtype)
    for name, value in fields.items():
        struct[name] = value
    return struct[()]


def _struct(*groups: tuple[str, Any]) -> np.dtype:
    """Return the dtype of a C struct; each group has the names of some fields, and their type."""
    fields = [(name, kind) for names, kind in groups for name in names.split()]
    return np.dtype(fields, align=True)


_BATCH_INTEGERS = _struct(("stride is_int64", np.int64))
_SCORE_STRIDES = _struct(("batch head row key", np.int64))

SCORE_PARAMS = _struct(
    ("bias mask", _SCORE_STRIDES),
    ("slopes_batch slopes_head sinks_stride", np.int64),
    ("seed", np.uint64),
    ("keep_from", np.uint32),
    ("keep_scale softcap_in softcap", np.float32),
    ("first_batch first_query", np.int32),
    ("first_counter", np.uint32),
)

# AttentionParams in cuda_src/attention/params.cuh
ATTENTION_PARAMS = _struct(
    ("q k v out lse", TOKEN_STRIDES),
    ("q_offsets seqused_k", _BATCH_INTEGERS),
    ("q_offset offset_least offset_most left right", np.int64),
    ("heads group sq sk", np.int32),
    ("scale_log2 softmax_scale", np.float32),
    ("scores", SCORE_PARAMS),
    ("together kv_together batches", np.int32),
)
ATTENTION_STRUCT = StructParameter("params", ATTENTION_PARAMS, "AttentionParams")

# SplitParams in cuda_src/attention/key_parts.cuh
SPLIT_PARAMS = _struct(("attention", ATTENTION_PARAMS), ("splits least_keys batch", np.int32))
SPLIT_STRUCT = StructParameter("params", SPLIT_PARAMS, "SplitParams", (ATTENTION_STRUCT,))

# DecodeParams in cuda_src/attention/decode/params.cuh
DECODE_PARAMS = _struct(
    ("attention", ATTENTION_PARAMS),
    ("k_scales v_scales", TOKEN_STRIDES),
    ("table_batch table_block", np.int64),
    ("batch kv_heads block_tiles row_tiles ctas", np.int32),
)
DECODE_STRUCT = StructParameter("params", DECODE_PARAMS, "DecodeParams", (ATTENTION_STRUCT,))

_CACHE_UNITS = _struct(("bytes block group", np.int32))
SCALE_LAYOUT = _struct(
    ("head", np.int64), ("token block_groups", np.int32), ("units", _CACHE_UNITS)
)

# PagedParams in cuda_src/attention/paged_params.cuh
PAGED_PARAMS = _struct(
    ("attention", ATTENTION_PARAMS),
    ("cu_seqlens_q", _BATCH_INTEGERS),
    ("table_batch", np.int64),
    ("table_block batch total", np.int32),
    ("block_reciprocal", np.uint32),
    ("block_shift block_span", np.int32),
    ("units", _CACHE_UNITS),
    ("scales", SCALE_LAYOUT),
)
PAGED_STRUCT = StructParameter("params", PAGED_PARAMS, "PagedParams", (ATTENTION_STRUCT,))

PACKED_BATCH = _struct(
    ("cu_seqlens_q cu_seqlens_k", _BATCH_INTEGERS),
    ("batch total_q total_k ends_with_keys", np.int32),
)

# VarlenParams in cuda_src/attention/varlen_params.cuh
VARLEN_PARAMS = _struct(("attention", ATTENTION_PARAMS), ("packed", PACKED_BATCH))
VARLEN_STRUCT = StructParameter("params", VARLEN_PARAMS, "VarlenParams", (ATTENTION_STRUCT,))

# QuantizedKeysParams in cuda_src/attention/int8/key_loader.cuh
QUANTIZED_KEYS_PARAMS = _struct(("scales", TOKEN_STRIDES), ("centre_batch centre_head", np.int64))
QUANTIZED_KEYS_STRUCT = StructParameter("quantized", QUANTIZED_KEYS_PARAMS, "QuantizedKeysParams")

# BackwardParams in cuda_src/attention/backward_params.cuh
BACKWARD_PARAMS = _struct(
    ("attention", ATTENTION_PARAMS),
    ("dout dlse dq dk dv", TOKEN_STRIDES),
    ("dbias", _SCORE_STRIDES),
    ("dsinks_stride zeroed", np.int64),
    ("batch rows_padded accumulate", np.int32),
    ("scale", np.float32),
)
BACKWARD_STRUCT = StructParameter("params", BACKWARD_PARAMS, "BackwardParams", (ATTENTION_STRUCT,))

# VarlenBackwardParams in cuda_src/attention/varlen_backward_params.cuh
VARLEN_BACKWARD_PARAMS = _struct(("backward", BACKWARD_PARAMS), ("packed", PACKED_BATCH))
VARLEN_BACKWARD_STRUCT = StructParameter(
    "params", VARLEN_BACKWARD_PARAMS, "VarlenBackwardParams", (BACKWARD_STRUCT, VARLEN_STRUCT)
)

# TeachingParams in cuda_src/attention/teaching/naive.cu and tiled.cu
TEACHING_PARAMS = _struct(
    ("q k v out lse", TOKEN_STRIDES),
    ("heads group sq sk causal", np.int32),
    ("softmax_scale", np.float32),
)
TEACHING_STRUCT = StructParameter("params", TEACHING_PARAMS, "TeachingParams")

# TeachingBackwardParams in cuda_src/attention/teaching/naive_backward.cu
TEACHING_BACKWARD_PARAMS = _struct(
    ("dout q k v out lse dlse dq dk dv", TOKEN_STRIDES),
    ("batch heads group sq sk causal accumulate", np.int32),
    ("softmax_scale", np.float32),
)
TEACHING_BACKWARD_STRUCT = StructParameter(
    "params", TEACHING_BACKWARD_PARAMS, "TeachingBackwardParams"
)

# DbiasParams in cuda_src/attention/tensor_core/backward_dbias.cu
DBIAS_PARAMS = _struct(
    ("shape repeats", (np.int64, 4)), ("source target", _SCORE_STRIDES), ("accumulate", np.int64)
)
DBIAS_STRUCT = StructParameter("params", DBIAS_PARAMS, "DbiasParams", (ATTENTION_STRUCT,))

# MergeParams in cuda_src/attention/merge.cu
MERGE_PARAMS = _struct(
    ("out_a lse_a out_b lse_b out lse", TOKEN_STRIDES),
    ("rows", np.int64),
    ("heads seq dim", np.int32),
)
MERGE_STRUCT = StructParameter("params", MERGE_PARAMS, "MergeParams", (ATTENTION_STRUCT,))

# RotaryParams in cuda_src/attention/rotary.cu
ROTARY_PARAMS = _struct(
    ("x out", (TOKEN_STRIDES, 2)),
    ("cos_stride sin_stride table_length", np.int64),
    ("query_threads", np.uint32),
    ("tokens heads groups", (np.uint32, 2)),
    ("slots rotated_slots half dim", np.uint32),
    ("sign", np.float32),
)
ROTARY_STRUCT = StructParameter("rotary", ROTARY_PARAMS, "RotaryParams")

# RotaryTables in cuda_src/attention/tensor_core/rotated_chunks.cuh
ROTARY_TABLES = _struct(("cos_stride sin_stride length half", np.int64))
ROTARY_TABLES_STRUCT = StructParameter("tables", ROTARY_TABLES, "RotaryTables")

# HeadRotationParams in cuda_src/rope/rotation.cuh
HEAD_ROTATION = _struct(
    ("cos_stride sin_stride table_length positions_batch positions_seq", np.int64),
    ("half positions_are_int64", np.int32),
)

# CentresParams in cuda_src/attention/key_centres.cu
CENTRES_PARAMS = _struct(
    ("k", TOKEN_STRIDES),
    ("centre_batch centre_head", np.int64),
    ("bounds seqused_k", _BATCH_INTEGERS),
    ("rotation", HEAD_ROTATION),
    ("seq heads dim sequences", np.int32),
)
CENTRES_STRUCT = StructParameter("params", CENTRES_PARAMS, "CentresParams", (ATTENTION_STRUCT,))

# KeysParams in cuda_src/attention/quantize_keys.cu
KEYS_PARAMS = _struct(
    ("k codes scales q", TOKEN_STRIDES),
    ("centre_batch centre_head", np.int64),
    ("bounds", _BATCH_INTEGERS),
    ("rotation", HEAD_ROTATION),
    ("groups key_rows rows", np.uint32),
    ("seq heads q_heads dim sequences", np.int32),
)
KEYS_STRUCT = StructParameter("params", KEYS_PARAMS, "KeysParams", (ATTENTION_STRUCT,))
