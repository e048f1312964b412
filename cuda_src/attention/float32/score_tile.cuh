// A warp's tile of scores in plain registers, for kernels without tensor cores: which lane owns which rows and keys.
//
// The 32 lanes form a grid of kRowLanes x kColumnLanes. A thread owns groups of four neighbouring rows of its warp and,
// of the keys, kPairs pairs: the places in 32 keys that one call of Philox serves (philox.cuh), as an mma fragment
// has them. In P V the same lanes share the output's columns.
//
// Neighbouring lanes alternate between rows and columns: then of both factors two lanes in four read the same 16
// bytes, and a load of 16 bytes a lane passes in two wavefronts where 8 lanes side by side would take four.
#pragma once

#include "../masks.cuh"
#include "../../common/numeric.cuh"

template <int kColumnLanes_>
struct LaneGrid {
  static constexpr int kColumnLanes = kColumnLanes_;
  static constexpr int kRowLanes = kWarpSize / kColumnLanes;
  static_assert(kColumnLanes == 8 || kColumnLanes == 16, "two or four lanes down");

  __device__ __forceinline__ static int row_lane() { return lane_index() % 2 + lane_index() / (2 * kColumnLanes) * 2; }
  __device__ __forceinline__ static int column_lane() { return lane_index() / 2 % kColumnLanes; }

  // Over the lanes that share rows; all of them receive the result.
  template <typename Op>
  __device__ __forceinline__ static float reduce_row(float x, Op op = Op()) {
#pragma unroll
    for (int distance = 2; distance < 2 * kColumnLanes; distance *= 2) {
      x = op(x, __shfl_xor_sync(kFullWarp, x, distance));
    }
    return x;
  }
};

template <typename Grid_, int kRows_, int kPairs_>
struct ScoreTile {
  using Grid = Grid_;
  static constexpr int kRows = kRows_;
  static constexpr int kPairs = kPairs_;
  static constexpr int kKeys = 2 * kPairs;
  static constexpr int kWarpRows = kRows * Grid::kRowLanes;
  static constexpr int kTileK = kKeys * Grid::kColumnLanes;
  static constexpr int kGroup = 4;  // neighbours that one load brings
  static_assert(kRows % kGroup == 0, "whole groups");
  static_assert(kPairs == 2 || kPairs == 4, "half of a Philox call's keys, or all");

  float s[kRows][kKeys];  // pair by pair

  __device__ __forceinline__ static int row_of(int i) {
    return (i / kGroup * Grid::kRowLanes + Grid::row_lane()) * kGroup + i % kGroup;
  }

  // The key of the tile that column lane `lane` holds as s[.][2 * pair + e].
  __device__ __forceinline__ static constexpr int key_at(int lane, int pair, int e) {
    return lane / 4 * (8 * kPairs) + 8 * pair + lane % 4 * 2 + e;
  }
  __device__ __forceinline__ static int key_of(int pair) { return key_at(Grid::column_lane(), pair, 0); }

  // body(pair, row, key) for each two neighbouring scores of a row: row of the warp, first key of the tile. One group
  // of rows after the other, in all lanes: what is loaded for all rows at once has no registers.
  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      if (i > 0 && i % kGroup == 0) __syncwarp();
#pragma unroll
      for (int n = 0; n < kPairs; n++) body(&s[i][2 * n], row_of(i), key_of(n));
    }
  }

  __device__ __forceinline__ static int lane_row() { return row_of(0); }
  __device__ __forceinline__ static int lane_key() { return key_of(0); }

  __device__ __forceinline__ void clear() {
    for_each_pair([](float* pair, int, int) { pair[0] = pair[1] = 0.f; });
  }

  // Scores outside of what their row sees become -inf. `visible` gives the keys that a row of the warp sees.
  template <typename Visible>
  __device__ __forceinline__ void mask(Visible visible, int first_key) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const KeyRange range = visible(row_of(i));
      const int begin = range.begin - first_key - key_of(0), end = range.end - first_key - key_of(0);
#pragma unroll
      for (int n = 0; n < kPairs; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (8 * n + e < begin || 8 * n + e >= end) s[i][2 * n + e] = -kInfinity;
        }
      }
    }
  }
};
