// The scores of one warp against one key tile, as the accumulator fragments of mma.m16n8k8.
//
// s[n][m][e] belongs to query row 16 m + lane / 4 + 8 (e / 2) of the warp and to row 8 n + 2 (lane % 4) + e % 2 of the
// tile of K in shared memory. In whose order the keys lie there (KeyOrder) decides which keys a thread holds.
#pragma once

#include "../common/mask.cuh"
#include "../common/mma.cuh"
#include "../common/numeric.cuh"

// How many neighbouring keys of a row a thread holds. kPairs: row r of the tile in shared memory is its key r. kQuads:
// within 16 keys, key 4 t + 2 n + e lies in row 8 n + 2 t + e, so that of two n8 tiles a thread holds the four keys from
// 4 t on, and reads what is given for each score four at a time.
enum class KeyOrder { kPairs, kQuads };

template <KeyOrder kOrder>
__device__ __forceinline__ int key_of_tile_row(int row) {
  if (kOrder == KeyOrder::kPairs) return row;
  return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
}

template <int kMTiles_, int kNTiles_, KeyOrder kOrder_ = KeyOrder::kPairs>
struct ScoreFragment {
  static constexpr KeyOrder kOrder = kOrder_;
  static constexpr int kMTiles = kMTiles_;  // of 16 query rows
  static constexpr int kNTiles = kNTiles_;  // of 8 keys

  float s[kNTiles][kMTiles][4];

  __device__ __forceinline__ static int row_of(int m, int half) { return 16 * m + 8 * half + lane_index() / 4; }
  __device__ __forceinline__ static int key_of(int n) {
    return (kOrder == KeyOrder::kQuads ? 4 : 2) * (lane_index() % 4) + key_step(n);
  }
  __device__ __forceinline__ static constexpr int key_step(int n) {
    return kOrder == KeyOrder::kQuads ? n / 2 * 16 + n % 2 * 2 : 8 * n;
  }

  // body(pair, row, key) for each two neighbouring scores of a row: row of the warp, first key of the tile.
  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
#pragma unroll
    for (int m = 0; m < kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++) body(&s[n][m][2 * half], row_of(m, half), key_of(n));
      }
    }
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
            if (key_step(n) + e < begin || key_step(n) + e >= end) s[n][m][2 * half + e] = -kInfinity;
          }
        }
      }
    }
  }
};
