// The macros of a product's configuration, and the shape of a CTA that follows from them.
#pragma once

#if !defined(TILE_ROWS) || !defined(TILE_COLUMNS) || !defined(TILE_INNER) || !defined(WARP_ROWS) ||                 \
    !defined(WARP_COLUMNS) || !defined(MIN_CTAS) || !defined(VEC) || !defined(SHARED_BYTES) || !defined(THREADS) || \
    !defined(NATIVE) || !defined(STAGES)
#error \
    "TILE_ROWS, TILE_COLUMNS, TILE_INNER, WARP_ROWS, WARP_COLUMNS, MIN_CTAS, VEC, SHARED_BYTES, THREADS, NATIVE and STAGES come from a launch-configuration table"
#endif
#include "epilogue.cuh"
#if NATIVE
#include "async_product.cuh"
#else
#include "tile_product.cuh"
#endif

struct CtaShape {
  static constexpr int kTileRows = TILE_ROWS;
  static constexpr int kTileColumns = TILE_COLUMNS;
  static constexpr int kInner = TILE_INNER;
  static constexpr int kThreads = (TILE_ROWS / WARP_ROWS) * (TILE_COLUMNS / WARP_COLUMNS) * kWarpSize;
  static_assert(kThreads == THREADS, "the table counts other threads");
  static_assert(VEC == 1 || VEC == kChunkItems, "single items or whole chunks");
  static_assert(NATIVE || STAGES == 2, "registers are the third stage of k-tiles that pass them");
};

template <Lines kLines>
using TileOfA = OperandTile<kLines, CtaShape::kTileRows, CtaShape::kInner>;
template <Lines kLines>
using TileOfB = OperandTile<kLines, CtaShape::kTileColumns, CtaShape::kInner>;

// The main loop: from sm_80 on with copies by cp.async, if lines are whole chunks (NATIVE).
#if NATIVE
template <typename LoaderA, typename LoaderB, typename Sum, typename Scalar>
using MainLoop = AsyncProduct<LoaderA, LoaderB, WARP_ROWS, WARP_COLUMNS, Sum, Scalar>;
#else
template <typename LoaderA, typename LoaderB, typename Sum, typename Scalar>
using MainLoop = TileProduct<LoaderA, LoaderB, WARP_ROWS, WARP_COLUMNS, Sum, Scalar>;
#endif

// The product of two operands of Scalar, or of int8 in pairs.
template <typename Scalar, typename LoaderA, typename LoaderB>
using ProductOf = MainLoop<LoaderA, LoaderB, float, Scalar>;
template <typename LoaderA, typename LoaderB>
using IntegerProductOf = MainLoop<LoaderA, LoaderB, int32, float16>;

// The place of this warp's part of a CTA's tile in the result.
template <typename Product, typename Columns>
__device__ __forceinline__ WarpCoordinates<Columns> warp_place(const TileCoordinates& cta,
                                                               const ProductParams& params) {
  const int row = warp_index() / Product::kWarpsAcross * WARP_ROWS;
  const int column = warp_index() % Product::kWarpsAcross * WARP_COLUMNS;
  return {cta.row_tile * CtaShape::kTileRows + row, cta.column_tile * CtaShape::kTileColumns + column, params.rows,
          params.columns};
}

template <typename Sum, int kMTiles, int kNTiles>
__device__ __forceinline__ void clear_sums(Sum (&acc)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0;
  }
}
