// The scores of one warp against one key tile, as the accumulator fragments of mma.m16n8k8.
//
// s[m][n][e] belongs to query row 16 m + lane / 4 + 8 (e / 2) of the warp and key 8 n + 2 (lane % 4) + e % 2 of the
// tile.
#pragma once

#include "../common/mask.cuh"
#include "../common/mma.cuh"
#include "../common/numeric.cuh"

template <int kMTiles_, int kNTiles_>
struct ScoreFragment {
  static constexpr int kMTiles = kMTiles_;  // of 16 query rows
  static constexpr int kNTiles = kNTiles_;  // of 8 keys

  float s[kMTiles][kNTiles][4];

  __device__ __forceinline__ static int row_of(int m, int half) { return 16 * m + 8 * half + lane_index() / 4; }
  __device__ __forceinline__ static int key_of(int n) { return 8 * n + lane_index() % 4 * 2; }

  // body(pair, row, key) for each two neighbouring scores of a row: row of the warp, first key of the tile.
  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
#pragma unroll
    for (int m = 0; m < kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++) body(&s[m][n][2 * half], row_of(m, half), key_of(n));
      }
    }
  }

  __device__ __forceinline__ void clear() {
    for_each_pair([](float* pair, int, int) { pair[0] = pair[1] = 0.f; });
  }

  // Scores outside of what their row sees become -inf. `visible` gives the keys that a row of the warp sees.
  template <typename Visible>
  __device__ __forceinline__ void mask(Visible visible, int first_key) {
#pragma unroll
    for (int m = 0; m < kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const KeyRange range = visible(row_of(m, half));
        const int begin = range.begin - first_key - key_of(0), end = range.end - first_key - key_of(0);
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (8 * n + e < begin || 8 * n + e >= end) s[m][n][2 * half + e] = -kInfinity;
          }
        }
      }
    }
  }
};
