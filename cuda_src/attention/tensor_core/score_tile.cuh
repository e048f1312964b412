// The scores that a thread holds: a warp's tile of scores as accumulator fragments of mma.m16n8k8, with either queries
// or keys along the m16 side.
//
// x[n][i][e] is item (16 i + lane / 4 + 8 (e / 2), 8 n + 2 (lane % 4) + e % 2). With queries along m16 that is a tile
// of S = Q K^T, whose fragments, packed, are the A operands of O += P V and dQ += dS K. With keys along m16 it is a
// tile of S^T = K Q^T, and of dV += P^T dout and dK += dS^T Q: P and dS need no trip through shared memory on the way.
//
// A thread's keys of a query may be neighbours: runs of kRun, which bias, mask and dbias are accessed by. The keys then
// lie in another order in the tiles of K and V in shared memory (item_of_row).
#pragma once

#include "../../common/mma.cuh"
#include "../../common/numeric.cuh"
#include "../masks.cuh"

enum class Along { kM16, kN8 };

// kHalves is 1 for a warp that has eight queries alone: the upper half of the fragment.
template <int kMTiles_, int kNTiles_, Along kKeys_, int kRun_ = 1, int kHalves_ = 2>
struct ScoreTile {
  static constexpr int kMTiles = kMTiles_;  // of 16
  static constexpr int kNTiles = kNTiles_;  // of 8
  static constexpr Along kKeys = kKeys_;
  static constexpr int kRun = kRun_;
  static constexpr int kHalves = kHalves_;
  static constexpr int kItems = 2 * kHalves;  // of a thread in a fragment
  static constexpr int kRuns = kMTiles * kNTiles * kItems / kRun;
  static constexpr bool kInOrder = kRun == 1;
  static_assert(kRun == 1 || kRun == 4 || (kKeys == Along::kM16 && kRun == 2), "1, 2 or 4 neighbouring keys");
  static_assert(kKeys == Along::kN8 || 2 * kMTiles % kRun == 0, "a thread has 2 kMTiles keys of a query");
  static_assert(kHalves == 2 || (kHalves == 1 && kKeys == Along::kN8), "one half of queries, not of keys");

  using Fragment = float[kNTiles][kMTiles][kItems];
  using Packed =
      uint32[kNTiles][kMTiles][kHalves];  // [half]: items e = 2 half and 2 half + 1, the latter in the high half

  __device__ __forceinline__ static int along_m(int i, int e) { return 16 * i + 8 * (e / 2) + lane_index() / 4; }
  __device__ __forceinline__ static int along_n(int n, int e) { return 8 * n + lane_index() % 4 * 2 + e % 2; }
  __device__ __forceinline__ static int row_of(int n, int i, int e) {
    return kKeys == Along::kM16 ? along_n(n, e) : along_m(i, e);
  }
  __device__ __forceinline__ static int key_of(int n, int i, int e) {
    if (kKeys == Along::kM16) return item_of_row(along_m(i, e));
    return lane_index() % 4 * (kRun == 1 ? 2 : 4) + key_step(n, e);
  }
  // Keys along n8: how far item e of n8 tile n is from the thread's first.
  __device__ __forceinline__ static constexpr int key_step(int n, int e) {
    return (kRun == 1 ? 8 * n : n / 2 * 16 + n % 2 * 2) + e % 2;
  }

  // The key of the tile in row `row` of the tiles of K and V in shared memory. Along m16 a thread's rows are
  // eight apart. Along n8 key 4 t + 2 n + e of 16 lies in row 8 n + 2 t + e: of two n8 tiles a thread holds the four
  // from 4 t on.
  __device__ __forceinline__ static int item_of_row(int row) {
    if (kKeys == Along::kM16) return row / (8 * kRun) * (8 * kRun) + row % 8 * kRun + row / 8 % kRun;
    return kRun == 1 ? row : row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;
  }

  // An item's number within its thread: run by run.
  __device__ __forceinline__ static constexpr int number(int n, int i, int e) {
    if (kRun == 1) return (n * kMTiles + i) * kItems + e;
    if (kKeys == Along::kN8) return ((n / 2 * kMTiles + i) * kHalves + e / 2) * 4 + n % 2 * 2 + e % 2;
    const int eight = 2 * i + e / 2;
    return ((n * 2 * kMTiles + eight / kRun * kRun) * 2 + e % 2 * kRun) + eight % kRun;
  }

  // body(n, i, e) for every item.
  template <typename Body>
  __device__ __forceinline__ static void for_each(const Body& body) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int e = 0; e < kItems; e++) body(n, i, e);
      }
    }
  }

  // body(n, i, half) for every two items that are packed together.
  template <typename Body>
  __device__ __forceinline__ static void for_each_pair(const Body& body) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int half = 0; half < kHalves; half++) body(n, i, half);
      }
    }
  }

  // Likewise, item by item along n8: row by row where queries lie along m16.
  template <typename Body>
  __device__ __forceinline__ static void for_each_pair_by_row(const Body& body) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < kHalves; half++) {
#pragma unroll
        for (int n = 0; n < kNTiles; n++) body(n, i, half);
      }
    }
  }
};

// Scores of queries along m16, as ScorePass takes them.
template <typename Tile_>
struct Scores {
  using Tile = Tile_;
  static_assert(Tile::kKeys == Along::kN8, "rows lie along m16");

  typename Tile::Fragment s;

  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
    Tile::for_each_pair_by_row(
        [&](int n, int i, int half) { body(&s[n][i][2 * half], Tile::row_of(n, i, 2 * half), Tile::key_of(n, i, 0)); });
  }

  // body(four) for every four scores of a row in neighbouring n8 tiles.
  template <typename Body>
  __device__ __forceinline__ void for_each_four(Body body) {
    static_assert(Tile::kNTiles % 2 == 0, "two n8 tiles at a time");
    Tile::for_each_pair_by_row([&](int n, int i, int half) {
      if (n % 2) return;
      float* four[4] = {&s[n][i][2 * half], &s[n][i][2 * half + 1], &s[n + 1][i][2 * half], &s[n + 1][i][2 * half + 1]};
      body(four);
    });
  }

  __device__ __forceinline__ static int lane_row() { return Tile::row_of(0, 0, 0); }
  __device__ __forceinline__ static int lane_key() { return Tile::key_of(0, 0, 0); }

  // Scores outside of what their row sees become -inf. `visible` gives the keys that a row of the warp sees.
  template <typename Visible>
  __device__ __forceinline__ void mask(Visible visible, int first_key) {
    const int lane_key = first_key + Tile::key_of(0, 0, 0);
#pragma unroll
    for (int i = 0; i < Tile::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < Tile::kHalves; half++) {
        const KeyRange range = visible(Tile::row_of(0, i, 2 * half));
        const int begin = range.begin - lane_key, end = range.end - lane_key;
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (Tile::key_step(n, e) < begin || Tile::key_step(n, e) >= end) s[n][i][2 * half + e] = -kInfinity;
          }
        }
      }
    }
  }
};

// One bit for each of a thread's scores.
template <typename Tile>
using SeenScores = uint32[div_up(Tile::kNTiles * Tile::kMTiles * Tile::kItems, 32)];
