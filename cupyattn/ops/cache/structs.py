"""The structs of a paged cache's kernels."""

from __future__ import annotations

import numpy as np

from cupyattn.runtime.spec import Struct

_SLOT_STRIDES = np.dtype([(axis, np.int64) for axis in ("outer", "inner", "head")], align=True)

# AppendParams in cuda_src/cache/append.cu
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
APPEND_STRUCT = Struct("params", APPEND_PARAMS, "AppendParams")

COPY_ARRAYS = 4
"""Arrays that one launch of copy_blocks takes."""

COPY_AXES = 4
"""Axes of a block's words (kCopyAxes in copy_blocks.cu)."""

COPIES_PASSED = 32
"""Copies that a launch is passed by value (kPassed in copy_blocks.cu)."""

# CopyBlocksParams in cuda_src/cache/copy_blocks.cu
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
COPY_BLOCKS_STRUCT = Struct("params", COPY_BLOCKS_PARAMS, "CopyBlocksParams")

# GatherParams in cuda_src/cache/gather.cu
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
GATHER_STRUCT = Struct("params", GATHER_PARAMS, "GatherParams")
