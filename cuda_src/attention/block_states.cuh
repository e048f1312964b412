// The states by a call's block mask of the one tile of scores that a CTA has in each of several matrices: the states
// that block_mask.cu wrote. (Lists, block_lists.cuh, are for loops over tiles; here each would have to be searched.)
#pragma once

#include "block_lists.cuh"

struct BlockStates {
  const unsigned char* states_g;
  const int64* strides;  // as those of BlockLists
};

// A tile of kRows queries by kKeys keys, kWarpRows queries a warp.
template <typename Blocks, int kRows, int kKeys, int kWarpRows>
struct TileStates;

template <int kRows, int kKeys, int kWarpRows>
struct TileStates<NoBlocks, kRows, kKeys, kWarpRows> {
  TileStates() = default;
  __device__ __forceinline__ TileStates(NoBlocks, int, int, int, int) {}

  __device__ __forceinline__ static bool any() { return true; }
  __device__ __forceinline__ static uint32 of_warp(int) { return kFull; }
};

template <int kRows, int kKeys, int kWarpRows>
struct TileStates<BlockStates, kRows, kKeys, kWarpRows> {
  static constexpr int kSpan = 16, kColumns = kKeys / kSpan, kStates = kRows / kSpan * kColumns;
  static_assert(kRows % kSpan == 0 && kKeys % kSpan == 0 && kWarpRows % kSpan == 0, "tiles are whole ones of the mask");
  static_assert(kStates <= kWarpSize, "a lane reads a state");

  uint32 some, all;  // whether some scores of 16 by 16 are seen, and all: a bit each, row by row

  TileStates() = default;
  // For whole warps. Nothing beyond the mask's last tile is a score.
  __device__ __forceinline__ TileStates(const BlockStates& blocks, int batch, int head, int first_row, int first_key) {
    const int row = first_row / kSpan + lane_index() / kColumns, column = first_key / kSpan + lane_index() % kColumns;
    const int64 rows = blocks.strides[2] / kSpan, columns = blocks.strides[3] / kSpan;
    const int64 matrix = batch * blocks.strides[0] + head * blocks.strides[1];
    const bool exists = lane_index() < kStates && row < rows && column < columns;
    const uint32 state = exists ? blocks.states_g[(matrix * rows + row) * columns + column] : kEmpty;
    some = __ballot_sync(kFullWarp, state != kEmpty);
    all = __ballot_sync(kFullWarp, !exists || state == kFull);
  }

  __device__ __forceinline__ bool any() const { return some != 0; }
  // How much the warp's rows see of 16 keys.
  __device__ __forceinline__ uint32 of_warp(int column) const {
    constexpr int kWarpSpans = kWarpRows / kSpan;
    uint32 own = 0;
#pragma unroll
    for (int row = 0; row < kWarpSpans; row++) own |= 1u << row * kColumns;
    own <<= warp_index() * kWarpSpans * kColumns + column;
    return (some & own) == 0 ? kEmpty : (all & own) == own ? kFull : kPartial;
  }
};
