"""The structs of products with a weight."""

from __future__ import annotations

import numpy as np

from cupyattn.runtime.spec import Struct

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
FLOAT_PRODUCT_STRUCT = Struct("params", FLOAT_PRODUCT_PARAMS, "FloatProductParams")

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
THIN_STRUCT = Struct("params", THIN_PARAMS, "ThinParams")

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
PRODUCT_STRUCT = Struct("params", PRODUCT_PARAMS, "ProductParams")

# PreactivationGradientParams in cuda_src/linear/tensor_core/preactivation_gradient.cu
PREACTIVATION_GRADIENT_PARAMS = np.dtype(
    [
        *((f"{name}_stride", np.int64) for name in ("dout", "preactivation")),
        *((field, np.int32) for field in ("rows", "columns", "block_rows", "column_blocks")),
    ],
    align=True,
)
PREACTIVATION_GRADIENT_STRUCT = Struct(
    "params", PREACTIVATION_GRADIENT_PARAMS, "PreactivationGradientParams"
)

# QuantizeParams in cuda_src/linear/quantised/quantize.cu
QUANTIZE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("inner_stride", "outer_stride")),
        *((field, np.uint32) for field in ("outer", "blocks", "block_size")),
    ],
    align=True,
)
QUANTIZE_STRUCT = Struct("params", QUANTIZE_PARAMS, "QuantizeParams")

# DequantizeParams in cuda_src/linear/quantised/dequantize.cu
DEQUANTIZE_PARAMS = np.dtype(
    [
        *((field, np.int64) for field in ("inner_stride", "outer_stride")),
        *((field, np.uint32) for field in ("outer", "units", "block_size")),
    ],
    align=True,
)
DEQUANTIZE_STRUCT = Struct("params", DEQUANTIZE_PARAMS, "DequantizeParams")

# QuantisedFloatParams in cuda_src/linear/quantised/float_operand.cuh
QUANTISED_FLOAT_PARAMS = np.dtype(
    [
        ("product", FLOAT_PRODUCT_PARAMS),
        *((field, np.int32) for field in ("blocks", "block_log2")),
    ],
    align=True,
)
QUANTISED_FLOAT_STRUCT = Struct(
    "params", QUANTISED_FLOAT_PARAMS, "QuantisedFloatParams", (FLOAT_PRODUCT_STRUCT,)
)

# QuantisedTileParams in cuda_src/linear/quantised/tile_feed.cuh
QUANTISED_TILE_PARAMS = np.dtype(
    [("product", PRODUCT_PARAMS), *((field, np.int32) for field in ("blocks", "block_log2"))],
    align=True,
)
QUANTISED_TILE_STRUCT = Struct(
    "params", QUANTISED_TILE_PARAMS, "QuantisedTileParams", (PRODUCT_STRUCT,)
)
