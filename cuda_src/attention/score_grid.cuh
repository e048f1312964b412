// A warp's tile of scores as accumulator fragments of mma.m16n8k8, with either queries or keys along the m16 side.
//
// x[n][i][e] is item (16 i + lane / 4 + 8 (e / 2), 8 n + 2 (lane % 4) + e % 2). With keys along m16 that is a tile of
// S^T = K Q^T, whose fragments, packed, are the A operands of dV += P^T dout and dK += dS^T Q: P^T and dS^T need no
// trip through shared memory on the way. With queries along m16, it is the A operand of dQ += dS K.
//
// In whose order keys lie along their side (KeyOrder) decides which of them a thread holds. With kQuads a thread's keys
// of a query are neighbours: along m16 all of them (2 kMTiles), along n8 four of each 16.
#pragma once

#include "score_fragment.cuh"

enum class Along { kM16, kN8 };

template <int kMTiles_, int kNTiles_, Along kKeys_, KeyOrder kOrder_ = KeyOrder::kPairs>
struct ScoreGrid {
  static constexpr int kMTiles = kMTiles_;  // of 16
  static constexpr int kNTiles = kNTiles_;  // of 8
  static constexpr Along kKeys = kKeys_;
  static constexpr KeyOrder kOrder = kOrder_;
  static constexpr bool kQuads = kOrder == KeyOrder::kQuads;

  // A run: neighbouring keys of one query that a thread holds, and that bias, mask and dbias are accessed by.
  static constexpr int kRun = !kQuads ? 1 : kKeys == Along::kM16 ? 2 * kMTiles : 4;
  static constexpr int kRuns = kMTiles * kNTiles * 4 / kRun;

  using Fragment = float[kNTiles][kMTiles][4];
  using Packed = uint32[kNTiles][kMTiles][2];  // [half]: items e = 2 half and 2 half + 1, the latter in the high half

  __device__ __forceinline__ static int along_m(int i, int e) { return 16 * i + 8 * (e / 2) + lane_index() / 4; }
  __device__ __forceinline__ static int along_n(int n, int e) { return 8 * n + lane_index() % 4 * 2 + e % 2; }
  __device__ __forceinline__ static int row_of(int n, int i, int e) {
    return kKeys == Along::kM16 ? along_n(n, e) : along_m(i, e);
  }
  __device__ __forceinline__ static int key_of(int n, int i, int e) {
    if (kKeys == Along::kM16) return kQuads ? lane_index() / 4 * kRun + 2 * i + e / 2 : along_m(i, e);
    return kQuads ? n / 2 * 16 + lane_index() % 4 * 4 + n % 2 * 2 + e % 2 : along_n(n, e);
  }

  // Keys along m16: which of a CTA's keys lies in row `row` of the tiles of K and V in shared memory.
  static constexpr bool kInOrder = !kQuads;
  __device__ __forceinline__ static int item_of_row(int row) {
    constexpr int kWarpKeys = 16 * kMTiles;
    return kQuads ? row / kWarpKeys * kWarpKeys + row % 8 * kRun + row % kWarpKeys / 8 : row;
  }

  // An item's number within its thread: run by run.
  __device__ __forceinline__ static constexpr int number(int n, int i, int e) {
    if (!kQuads) return (n * kMTiles + i) * 4 + e;
    if (kKeys == Along::kM16) return (2 * n + e % 2) * kRun + 2 * i + e / 2;
    return ((n / 2 * kMTiles + i) * 2 + e / 2) * kRun + n % 2 * 2 + e % 2;
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

// An AND mask of packed items.
__device__ __forceinline__ uint32 halves_mask(bool low, bool high) {
  return (low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u);
}
