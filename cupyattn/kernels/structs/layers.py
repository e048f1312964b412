"""The structs of kernels of layers that are no walk over rows or elements."""

from __future__ import annotations

import numpy as np

from cupyattn.kernels.spec import Struct
from cupyattn.kernels.structs.strides import TOKEN_STRIDES

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
NORM_STRUCT = Struct("params", NORM_PARAMS, "NormParams")

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
SAMPLE_STRUCT = Struct("params", SAMPLE_PARAMS, "SampleParams")

# RopeParams in cuda_src/layers/rope.cu
ROPE_PARAMS = np.dtype(
    [
        *((array, TOKEN_STRIDES, (2,)) for array in ("x", "out")),
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
ROPE_STRUCT = Struct("params", ROPE_PARAMS, "RopeParams")
