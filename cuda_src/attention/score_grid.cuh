// A warp's tile of scores as accumulator fragments of mma.m16n8k8, with either queries or keys along the m16 side.
//
// x[n][i][e] is item (16 i + lane / 4 + 8 (e / 2), 8 n + 2 (lane % 4) + e % 2). With keys along m16 that is a tile of
// S^T = K Q^T, whose fragments, packed, are the A operands of dV += P^T dout and dK += dS^T Q: P^T and dS^T need no
// trip through shared memory on the way. With queries along m16, it is the A operand of dQ += dS K.
//
// A thread's keys of a query may be neighbours: runs of kRun, which bias, mask and dbias are accessed by. The keys then
// lie along their side in another order (along m16 item_of_row, along n8 KeyOrder::kQuads).
#pragma once

#include "score_fragment.cuh"

enum class Along { kM16, kN8 };

template <int kMTiles_, int kNTiles_, Along kKeys_, int kRun_ = 1>
struct ScoreGrid {
  static constexpr int kMTiles = kMTiles_;  // of 16
  static constexpr int kNTiles = kNTiles_;  // of 8
  static constexpr Along kKeys = kKeys_;
  static constexpr int kRun = kRun_;
  static constexpr int kRuns = kMTiles * kNTiles * 4 / kRun;
  static constexpr bool kInOrder = kRun == 1;
  static_assert(kRun == 1 || kRun == 4 || (kKeys == Along::kM16 && kRun == 2), "1, 2 or 4 neighbouring keys");
  static_assert(kKeys == Along::kN8 || 2 * kMTiles % kRun == 0, "a thread has 2 kMTiles keys of a query");

  using Fragment = float[kNTiles][kMTiles][4];
  using Packed = uint32[kNTiles][kMTiles][2];  // [half]: items e = 2 half and 2 half + 1, the latter in the high half

  __device__ __forceinline__ static int along_m(int i, int e) { return 16 * i + 8 * (e / 2) + lane_index() / 4; }
  __device__ __forceinline__ static int along_n(int n, int e) { return 8 * n + lane_index() % 4 * 2 + e % 2; }
  __device__ __forceinline__ static int row_of(int n, int i, int e) {
    return kKeys == Along::kM16 ? along_n(n, e) : along_m(i, e);
  }
  __device__ __forceinline__ static int key_of(int n, int i, int e) {
    if (kKeys == Along::kM16) return item_of_row(along_m(i, e));
    return kRun == 1 ? along_n(n, e) : n / 2 * 16 + lane_index() % 4 * 4 + n % 2 * 2 + e % 2;
  }

  // Keys along m16: which of a CTA's keys lies in row `row` of the tiles of K and V in shared memory. A thread's rows
  // are eight apart.
  __device__ __forceinline__ static int item_of_row(int row) {
    return row / (8 * kRun) * (8 * kRun) + row % 8 * kRun + row / 8 % kRun;
  }

  // An item's number within its thread: run by run.
  __device__ __forceinline__ static constexpr int number(int n, int i, int e) {
    if (kRun == 1) return (n * kMTiles + i) * 4 + e;
    if (kKeys == Along::kN8) return ((n / 2 * kMTiles + i) * 2 + e / 2) * 4 + n % 2 * 2 + e % 2;
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
        for (int e = 0; e < 4; e++) body(n, i, e);
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
        for (int half = 0; half < 2; half++) body(n, i, half);
      }
    }
  }
};
