// The macros of the skinny kernel for a quantised weight, and all that follows from them: the division of columns and K
// among CTAs, warps and lanes.
#pragma once

#if !defined(FORMAT) || !defined(BLOCK_SIZE) || !defined(VEC) || !defined(VEC_SCALES) || !defined(ACTIVATION) || \
    !defined(GATED) || !defined(OUT) || !defined(W_TILES) || !defined(X_TILES) || !defined(PARTS) ||             \
    !defined(X_SLOTS) || !defined(STEPS) || !defined(GROUPS) || !defined(K_WARPS) || !defined(PASS_TILES) ||     \
    !defined(MIN_CTAS) || !defined(THREADS) || !defined(SHARED_BYTES)
#error \
    "FORMAT, BLOCK_SIZE, VEC, VEC_SCALES, ACTIVATION, GATED, OUT, W_TILES, X_TILES, PARTS, X_SLOTS, STEPS, GROUPS, \
K_WARPS, PASS_TILES, MIN_CTAS, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/mma.cuh"
#include "../skinny/tile.cuh"
#include "skinny_codes.cuh"
#include "skinny_scales.cuh"

struct Traits {
  using Format = FORMAT;
  static constexpr int kWTiles = W_TILES;
  static constexpr int kXTiles = X_TILES;
  static constexpr int kParts = PARTS;
  static constexpr int kRows = 8 / kParts;  // of x in a tile
  static constexpr int kXSlots = X_SLOTS;
  static constexpr int kSteps = STEPS;
  static constexpr int kGroups = GROUPS;
  static constexpr int kKWarps = K_WARPS;
  static constexpr int kPassTiles = PASS_TILES;
  static constexpr int kWarps = kGroups * kKWarps;
  static constexpr int kGroupThreads = kKWarps * kWarpSize;

  static constexpr int kLaneItems = kVectorBytes * 8 / Format::kBits;  // k of a lane's load
  static constexpr int kSpanItems = 4 * kLaneItems;
  static constexpr int kStepItems = kParts * kSpanItems;
  static constexpr int kBurstItems = kSteps * kStepItems;
  static constexpr int kBlockItems = BLOCK_SIZE == 0 || BLOCK_SIZE > kSpanItems ? kSpanItems : BLOCK_SIZE;
  static constexpr int kBlocks = kSpanItems / kBlockItems;  // of a span, or the part of one that it is
  // Two chains save shifts but cost a sum for each block and result: they pay for many words or few results.
  using Pairs = PairsOf<Format, (kBlocks < 4 && kXTiles < 4) ? 2 : 1>::Type;
  static constexpr bool kColumnScale = BLOCK_SIZE == 0;
  static constexpr int kBlockVectors = kColumnScale ? 1 : BLOCK_SIZE / kLaneItems;  // of codes
  static constexpr int kChunks = kLaneItems / 8;  // 8 k each, for which a lane has 16 bytes of x
  static constexpr int kChunkWords = 4 / kChunks;

  // With eight parts, one of a lane's products in a line counts, otherwise two.
  static constexpr int kLineSums = kParts == 8 ? 1 : 2;
  static constexpr int kColumns = 16 * kWTiles / kParts;  // of a warp
  static constexpr int kLines = 2 * kWTiles;              // that a lane reads of
  using Tile = ColumnTile<kColumns, GATED>;
  using Scales = SpanScales<Format, kBlocks, VEC_SCALES>;
  using Part = CtaPart<sizeof(OUT) == sizeof(float), Tile::kResults, kBurstItems>;
  // Lanes that store at once have different banks: rows of results are 8 banks apart, or 5 or 3 with few columns.
  static constexpr int kLine = kColumns + (kColumns >= 8 ? 4 : 1);

  // A CTA that computes a table takes many tiles, and its loads run ahead: a burst is loaded after the products of the
  // one before, so that memory is busy during the epilogue. Otherwise each group has one tile, and registers matter
  // more. Speed relative to reading, on an H200 as compute_75 code (2026-11-23, M 1, 16384 x 4096): Nf4 0.56 and Int4
  // 0.62 ahead, 0.54 and 0.73 otherwise.
  static constexpr bool kAhead = Pairs::Table::kEntries > 0;

  static_assert(kWarps * kWarpSize == THREADS, "the table derives the threads");
  static_assert(8 % kParts == 0 && (kParts == 1 || kXTiles == 1), "parts fill the rows that one tile lacks");
  static_assert(kXTiles % kPassTiles == 0 && kXSlots <= kSteps * kChunks, "whole passes");
  static_assert(kBlocks == 1 || kBlocks == 2 || kBlocks == 4, "trades of words are by two or four");
  static_assert(kKWarps == 1 || kGroups < 16, "each group has a barrier of its own");
  static_assert(kColumns <= kKWarps * kWarpSize, "a thread has one bias");
  static_assert(!kColumnScale || !Scales::kShifted, "a shift is a block's");
};

using Tile = Traits::Tile;

__device__ __forceinline__ int group_index() { return threadIdx.x / Traits::kGroupThreads; }
__device__ __forceinline__ int group_thread() { return threadIdx.x % Traits::kGroupThreads; }
__device__ __forceinline__ int warp_in_group() { return group_thread() / kWarpSize; }
__device__ __forceinline__ int lane_group() { return lane_index() / 4; }     // g
__device__ __forceinline__ int lane_in_group() { return lane_index() % 4; }  // t
