// Loads of w and x for tensor cores: fragments of mma.m16n8k8 directly from global memory.
//
// 16 columns of w are the m16 side of an instruction, 8 rows of x the n8 side; g = lane / 4 counts within each side and
// t = lane % 4 along k. Of 32 neighbouring k a lane owns the eight from 8 t on, for w and x alike, two to each of four
// instructions: a thread multiplies exactly the items that it loads, and only the order of the sum over k changes.
//
// A storage of w, of items of Scalar, is a class of this form (WeightsAlongK, WeightsAlongN):
//   Weights(w_g, params, first)     the tile whose first result is column `first`
//   load(k, end)                    load a burst of kSteps * 32 k from k on; those from `end` on are zeros
//   fragment(a, step, quarter, i)   the A fragment of m16 tile i, for instruction `quarter` of a step
//   slot(column)                    where the accumulators have a column of the tile: 8 (row of the fragment / 8) + g
#pragma once

#include "tile.cuh"

constexpr int kStepItems = 32;  // k of a step: four instructions
constexpr int kLaneItems = 8;   // of which a lane owns so many

__device__ __forceinline__ int lane_group() { return lane_index() / 4; }     // g
__device__ __forceinline__ int lane_in_group() { return lane_index() % 4; }  // t
__device__ __forceinline__ int lane_first_item() { return lane_in_group() * kLaneItems; }

// w (N, K): a column's k are neighbours. A lane reads 16 bytes of each of its columns, four lanes 64 of one.
template <typename Tile, int kSteps, int kVec, typename Scalar>
struct WeightsAlongK {
  static constexpr int kLines = Tile::kColumns / 8;  // columns of a lane
  const Scalar* line_g[kLines];
  uint32 pairs[kSteps][kLines][kLaneItems / 2];

  // Columns beyond the last read the last: their sums are not stored.
  __device__ __forceinline__ WeightsAlongK(const Scalar* w_g, const ThinParams& params, int first) {
#pragma unroll
    for (int i = 0; i < kLines; i++) {
      const int column = 8 * i + lane_group();
      const int64 line = min(Tile::result(first, column), params.outer - 1) + Tile::half(column, params.outer);
      line_g[i] = w_g + line * params.w_stride + lane_first_item();
    }
  }

  __device__ __forceinline__ void load(int k, int end) {
    const int count = end - k - lane_first_item();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const int skip = step * kStepItems;
#pragma unroll
      for (int i = 0; i < kLines; i++) {
        load_pairs<kLaneItems, kVec, true>(pairs[step][i], line_g[i] + k + skip, count - skip);
      }
    }
  }

  __device__ __forceinline__ void fragment(uint32 (&a)[2], int step, int quarter, int i) const {
    a[0] = pairs[step][2 * i][quarter];
    a[1] = pairs[step][2 * i + 1][quarter];
  }

  __device__ __forceinline__ static int slot(int column) { return column; }
};

// w (K, N): a row's columns are neighbours. A lane reads kItems columns of each of its eight k, eight lanes 16 kItems
// bytes of one row; pairs of neighbouring k are assembled by byte permutes.
template <typename Tile, int kSteps, int kVec, typename Scalar>
struct WeightsAlongN {
  static constexpr int kItems = Tile::kColumns / 8;  // columns of a lane, side by side
  const Scalar* columns_g;
  int64 stride;
  int count;  // of these columns that exist
  uint32 pairs[kSteps][kLaneItems][kItems / 2];

  __device__ __forceinline__ WeightsAlongN(const Scalar* w_g, const ThinParams& params, int first) {
    const int column = kItems * lane_group(), result = Tile::result(first, column);
    columns_g = w_g + lane_first_item() * params.w_stride + Tile::half(column, params.outer) + result;
    stride = params.w_stride;
    count = params.outer - result;
  }

  __device__ __forceinline__ void load(int k, int end) {
    const Scalar* row_g = columns_g + k * stride;
    const int rows = end - k - lane_first_item();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
#pragma unroll
      for (int i = 0; i < kLaneItems; i++) {
        load_pairs<kItems, kVec, true>(pairs[step][i], row_g, step * kStepItems + i < rows ? count : 0);
        row_g += i + 1 < kLaneItems ? stride : (kStepItems - kLaneItems + 1) * stride;
      }
    }
  }

  // Column kItems g + 2 i is row g of the fragment, its right neighbour row g + 8.
  __device__ __forceinline__ void fragment(uint32 (&a)[2], int step, int quarter, int i) const {
    const uint32 even = pairs[step][2 * quarter][i], odd = pairs[step][2 * quarter + 1][i];
    a[0] = __byte_perm(even, odd, 0x5410);
    a[1] = __byte_perm(even, odd, 0x7632);
  }

  __device__ __forceinline__ static int slot(int column) { return column % kItems * 8 + column / kItems; }
};

// Rows of x, 8 to a tile, kSlots steps of them at a time. Rows beyond the last are zeros.
template <int kTiles, int kSlots, int kVec, typename Scalar>
struct InputRows {
  const Scalar* row_g;  // row g
  int64 tile_stride;
  int rows;  // from that one on
  uint32 pairs[kSlots][kTiles][kLaneItems / 2];

  __device__ __forceinline__ InputRows(const Scalar* x_g, const ThinParams& params) {
    row_g = x_g + lane_group() * params.x_stride + lane_first_item();
    tile_stride = 8 * params.x_stride;
    rows = params.rows - lane_group();
  }

  __device__ __forceinline__ void load(int step, int k, int end) {
    const int skip = step * kStepItems, count = end - k - lane_first_item();
    const Scalar* source = row_g + k + skip;
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
      load_pairs<kLaneItems, kVec, false>(pairs[step % kSlots][i], source, 8 * i < rows ? count - skip : 0);
      source += tile_stride;
    }
  }

  __device__ __forceinline__ uint32 fragment(int step, int quarter, int i) const {
    return pairs[step % kSlots][i][quarter];
  }
};
