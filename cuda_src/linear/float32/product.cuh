// C = A B over the whole depth of the sum: a CTA computes a tile of C, a thread 8 x 8 of it, 4 x 4 lanes apart.
//
// A warp's lanes are 4 by 8: its part of the tile is 32 rows by 64 columns. A thread owns rows 4 r to 4 r + 3 and 16
// more, and columns 4 c to 4 c + 3 and 32 more: at each depth of a step, four loads of 16 bytes serve 64 FFMAs.
#pragma once

#include "../../common/outer_products.cuh"
#include "operands.cuh"

// Field for field FLOAT_PRODUCT_PARAMS of cupyattn/ops/linear/kernels_float32.py. Strides are in items, from one
// contiguous line of an array to the next. `half` is the width of each half with a gated activation, otherwise 0.
struct FloatProductParams {
  int64 a_stride, b_stride, preactivation_stride, residual_stride, result_stride;
  int64 rows, columns, depth, half;
  int64 accumulate;
};
static_assert(sizeof(FloatProductParams) == FLOAT_PRODUCT_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kThreadRows = 8, kThreadColumns = 8;
constexpr int kGroup = 4;  // neighbouring rows or columns of a thread
constexpr int kRowLanes = 4, kColumnLanes = 8;
constexpr int kWarpRows = kRowLanes * kThreadRows, kWarpColumns = kColumnLanes * kThreadColumns;

template <int kRows_, int kColumns_, int kThreads_>
struct ProductTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kThreads = kThreads_;
  static constexpr int kColumnWarps = kColumns / kWarpColumns;
  static_assert(kRows % kWarpRows == 0 && kColumns % kWarpColumns == 0, "whole warps");
  static_assert(kRows / kWarpRows * kColumnWarps * kWarpSize == kThreads, "a warp for each of its parts");

  // The places of the thread's row i and column j in the tile.
  __device__ __forceinline__ static int row(int i) {
    return warp_index() / kColumnWarps * kWarpRows + i / kGroup * (kRowLanes * kGroup) +
           lane_index() / kColumnLanes * kGroup + i % kGroup;
  }
  __device__ __forceinline__ static int column(int j) {
    return warp_index() % kColumnWarps * kWarpColumns + j / kGroup * (kColumnLanes * kGroup) +
           lane_index() % kColumnLanes * kGroup + j % kGroup;
  }
};
static_assert(kPairedLines == kColumnLanes * kGroup,
              "a thread's first columns are a gate, the others what it multiplies");

// The tile that a CTA computes. Neighbouring CTAs compute eight tiles of rows before the next tile of columns, so that
// CTAs that run at a time share lines of both factors in L2.
struct TilePlace {
  int64 row, column;

  __device__ __forceinline__ TilePlace(int64 row_tiles, int64 column_tiles)
      : TilePlace(row_tiles, column_tiles, blockIdx.x) {}
  __device__ __forceinline__ TilePlace(int64 row_tiles, int64 column_tiles, uint32 cta) {
    constexpr int64 kGroupRows = 8;
    const int64 group = cta / (kGroupRows * column_tiles), within = cta % (kGroupRows * column_tiles);
    const int64 rows = min(kGroupRows, row_tiles - group * kGroupRows);
    row = group * kGroupRows + within % rows;
    column = within / rows;
  }
};

template <typename A, typename B>
struct ProductSmem {
  float buffers[2][(A::kBytes + B::kBytes) / sizeof(float)];
};

template <typename Tile, typename A, typename B>
__device__ __forceinline__ void multiply(float (&c)[kThreadRows][kThreadColumns], const A& a, const B& b,
                                         ProductSmem<A, B>& smem) {
  constexpr int kDepth = A::kDepth;
  constexpr int kUnrolled = A::kItems;  // a flip is the same for so many
  constexpr int kGroups = kDepth / kUnrolled;
  static_assert(kDepth == B::kDepth, "one step of both");
  const uint32 first_s = shared_address(smem.buffers[0]);
  constexpr uint32 kBufferBytes = A::kBytes + B::kBytes;

  typename A::Fetched fetched_a;
  typename B::Fetched fetched_b;
  a.fetch(fetched_a, 0);
  b.fetch(fetched_b, 0);
  a.store(fetched_a, 0, first_s);
  b.store(fetched_b, 0, first_s + A::kBytes);
  __syncthreads();  // the first buffer is filled

  const uint32 a_s = first_s + Tile::row(0) * sizeof(float);
  const uint32 b_s = first_s + A::kBytes + Tile::column(0) * sizeof(float);
  const int steps = static_cast<int>((a.depth + kDepth - 1) / kDepth);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const uint32 buffer = step % 2 * kBufferBytes, other = kBufferBytes - buffer;
    a.fetch(fetched_a, step + 1);
    b.fetch(fetched_b, step + 1);
    add_products<kUnrolled>(
        c, kGroups, [&](float (&x)[kThreadRows], float (&y)[kThreadColumns], int group, int within) {
          const int first = group % kGroups * kUnrolled;
          const uint32 flip = A::flip(first);
          const uint32 x_s = ((a_s + buffer) ^ flip) + first * A::kDepthBytes + within * A::kDepthBytes;
          const uint32 y_s = ((b_s + buffer) ^ flip) + first * B::kDepthBytes + within * B::kDepthBytes;
          ld_shared_group(x, 0, x_s);
          ld_shared_group(x, kGroup, x_s ^ (kRowLanes * kGroup * sizeof(float)));
          ld_shared_group(y, 0, y_s);
          ld_shared_group(y, kGroup, y_s + kColumnLanes * kGroup * sizeof(float));
        });
    // The other buffer was last read in the step before, whose barrier all threads have passed.
    a.store(fetched_a, step + 1, first_s + other);
    b.store(fetched_b, step + 1, first_s + other + A::kBytes);
    __syncthreads();  // the other buffer is filled, and this one read
  }
}

// Four neighbouring items of a row, of which `count` exist. kVec is 4 if that is all or none, otherwise 1.
template <int kVec, typename Scalar>
__device__ __forceinline__ void load_group(float (&x)[kGroup], const Scalar* source_g, int64 count) {
  if constexpr (kVec == kGroup) {
    if (count > 0) load_vec(x, source_g);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      if (i < count) x[i] = to_float(source_g[i]);
    }
  }
}
template <int kVec, typename Scalar>
__device__ __forceinline__ void store_group(Scalar* target_g, const float (&x)[kGroup], int64 count) {
  if constexpr (kVec == kGroup) {
    if (count > 0) store_vec(target_g, x);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; i++) {
      if (i < count) target_g[i] = from_float<Scalar>(x[i]);
    }
  }
}

// A tile of a gradient, or its sum with the contents of the array.
template <int kVec, typename Tile, typename Scalar>
__device__ __forceinline__ void store_gradient(Scalar* result_g, const float (&c)[kThreadRows][kThreadColumns],
                                               const FloatProductParams& params, int64 first_row, int64 first_column) {
#pragma unroll
  for (int i = 0; i < kThreadRows; i++) {
    const int64 row = first_row + Tile::row(i);
    if (row >= params.rows) continue;
#pragma unroll
    for (int j = 0; j < kThreadColumns; j += kGroup) {
      const int64 column = first_column + Tile::column(j), count = params.columns - column;
      Scalar* const target_g = result_g + row * params.result_stride + column;
      float x[kGroup] = {};
      if (params.accumulate) load_group<kVec>(x, target_g, count);
#pragma unroll
      for (int k = 0; k < kGroup; k++) x[k] += c[i][j + k];
      store_group<kVec>(target_g, x, count);
    }
  }
}
