// The tile loader of a quantised weight: codes and scales to registers, and k-tiles later from there as weights
// in 16 bits to shared memory (operand_loader.cuh has the loader of an array).
//
// A thread fetches runs of 16 neighbouring weights of a row of codes, which share a scale, and stores two chunks of
// each. Rows of codes are columns of B (lines along the sum) or items of the sum (lines across it). Columns
// beyond the last one read the last one again, and their results are not stored. Items of the sum beyond the array are
// zeros.
#pragma once

#include "../tensor_core/operand_loader.cuh"
#include "tile_codes.cuh"

// Field for field QUANTISED_TILE of cupyattn/ops/linear/kernels_quantised_tile.py. b_stride of the product is
// the weights of a row.
struct QuantisedTileParams {
  ProductParams product;
  int blocks;      // in a row
  int block_log2;  // weights of a block; 31 if a row is one block
};
static_assert(sizeof(QuantisedTileParams) == QUANTISED_TILE_PARAMS_BYTES,
              "QuantisedTileParams and its NumPy twin are one layout");

// The division of the runs of a tile among kThreads threads.
template <typename Tile_, int kThreads>
struct Runs {
  using Tile = Tile_;
  using Swizzled = typename Tile::Swizzled;
  static constexpr int kLanes = Tile::kInner / kRunItems;    // along the sum: those of a line
  static constexpr int kPassRuns = kThreads / Tile::kInner;  // across it: a line's, in a pass
  static constexpr int kPassLines = Tile::kAlong ? kThreads / kLanes : Tile::kInner;
  static constexpr int kCount = Tile::kOuter * Tile::kInner / kRunItems / kThreads;
  static_assert(kCount * kThreads * kRunItems == Tile::kOuter * Tile::kInner, "whole passes");
  static_assert(Tile::kInner == 32 && kThreads % 128 == 0, "lanes that store together touch every bank once");

  // This thread's run i within the tile: its line, and its first position along the line. Across the sum eight lanes
  // that store together have eight lines, and four have a sector of one.
  __device__ __forceinline__ static int line(int i) {
    return Tile::kAlong ? i * kPassLines + threadIdx.x / kLanes : warp_index() % 4 * 8 + threadIdx.x % 8;
  }
  __device__ __forceinline__ static int place(int i) {
    const int run = Tile::kAlong ? threadIdx.x % kLanes : i * kPassRuns + warp_index() / 4 * 4 + lane_index() / 8;
    return run * kRunItems;
  }

  // Offsets in shared memory: of run 0, and from there to run i.
  __device__ __forceinline__ static uint32 shared_offset() { return Swizzled::offset(line(0), place(0) / kChunkItems); }
  __device__ __forceinline__ static constexpr uint32 shared_distance(int i) {
    return Tile::kAlong ? i * kPassLines * Swizzled::kRowBytes : i * kPassRuns * kRunItems * int(sizeof(float16));
  }
};

// The arrays of a weight.
template <typename Format>
struct QuantisedArrays {
  const unsigned char* codes_g;
  const typename Format::Scale* scales_g;
  const float16* super_scales_g;
};

// The weights are stored as Scalar.
template <typename Format, typename Tile_, typename Outer, int kThreads, typename Scalar>
struct QuantisedLoader {
  using Tile = Tile_;
  using Chunks = Runs<Tile, kThreads>;
  using Fetched = Run<Format>;
  static constexpr bool kCopied = false;
  static constexpr int kFetches = Chunks::kCount, kStores = kRunItems / kChunkItems;
  static constexpr int kOuterItems = Tile::kOuter / Outer::kHalves;
  static constexpr int kScaleBytes = Format::kNumbers * sizeof(typename Format::Scale);
  static constexpr int kAboveBytes = Format::kNumbers * sizeof(float16);
  static constexpr bool kAbove = Format::kSuperBlock > 0;
  static_assert(Tile::kAlong || !Outer::kPaired, "a run has columns of one half");

  // Uniform, as of an array; offsets from there are of 32 bits.
  const char* tile_g;
  const char* scales_g;
  const char* above_g;
  int64 item_bytes;  // of codes, from one item of the sum to the next, in eighths
  int blocks, block_log2;
  int inner;  // along the sum: the first of the current k-tile
  uint32 offset[kFetches], scale_offset[kFetches];

  __device__ __forceinline__ QuantisedLoader(const QuantisedArrays<Format>& weight, const QuantisedTileParams& params,
                                             int first_outer, int outer_length, int first_inner)
      : blocks(params.blocks), block_log2(params.block_log2), inner(first_inner) {
    const int64 row_bytes = params.product.b_stride * Format::kBits / 8;
    const int64 first_row = Tile::kAlong ? first_outer : first_inner;
    const int first_place = Tile::kAlong ? first_inner : first_outer;
    tile_g = reinterpret_cast<const char*>(weight.codes_g) + first_row * row_bytes + first_place * Format::kBits / 8;
    scales_g = reinterpret_cast<const char*>(weight.scales_g) + first_row * blocks * kScaleBytes;
    above_g = reinterpret_cast<const char*>(weight.super_scales_g) + first_row * super_blocks() * kAboveBytes;
    item_bytes = Tile::kAlong ? Format::kBits : 8 * row_bytes;
    const int left = outer_length - first_outer;
    const int last = Tile::kAlong ? min(kOuterItems, left) - 1 : (left - 1) / kRunItems * kRunItems;
#pragma unroll
    for (int i = 0; i < kFetches; i++) {
      const int outer = Tile::kAlong ? Chunks::line(i) : Chunks::place(i);
      const int item = min(Outer::item(outer), last) + Outer::half(outer) * outer_length;
      const int line = Tile::kAlong ? item : Chunks::line(i), place = Tile::kAlong ? Chunks::place(i) : item;
      offset[i] = static_cast<uint32>(line * row_bytes + place * Format::kBits / 8);
      const int block = Tile::kAlong ? 0 : (first_outer + place) >> block_log2;
      scale_offset[i] = (static_cast<uint32>(line) * blocks + block) * kScaleBytes;
    }
  }

  __device__ __forceinline__ int super_blocks() const {
    return blocks * kRunItems * 2 / (kAbove ? Format::kSuperBlock : 1);
  }

  // Load run i, `ahead` k-tiles from the current one, of which `valid` items of the sum exist: all or none, unless it
  // is ragged. If none exists, the registers stay as they are.
  template <bool kRagged>
  __device__ __forceinline__ void load(Fetched& run, int i, int ahead, int valid) const {
    const bool wanted = (!kRagged ? 0 : Tile::kAlong ? Chunks::place(i) : Chunks::line(i)) < valid;
    const int items = ahead * Tile::kInner;
    ld_global_if(run.codes, tile_g + items * item_bytes / 8 + offset[i], wanted);
    const int64 blocks_on = Tile::kAlong ? inner + items >> block_log2 : items * blocks;
    const char* scale_g = scales_g + blocks_on * kScaleBytes + scale_offset[i];
    if constexpr (kAbove) {
      constexpr int kPerSuperBlock = Format::kSuperBlock / 32;
      const int64 above_on = Tile::kAlong ? (inner + items) / Format::kSuperBlock : items * super_blocks();
      const uint32 own = scale_offset[i] / (kScaleBytes * kPerSuperBlock) * kAboveBytes;
      uint32 above[1] = {run.above};
      ld_global_u16_if(run.scale, scale_g, wanted);
      ld_global_if(above, above_g + above_on * kAboveBytes + own, wanted);
      run.above = above[0];
    } else {
      uint32 scale[1] = {run.scale};
      ld_global_if(scale, scale_g, wanted);
      run.scale = scale[0];
    }
  }

  __device__ __forceinline__ void advance(int items) {
    tile_g += items * item_bytes / 8;
    if constexpr (Tile::kAlong) {
      inner += items;
    } else {
      scales_g += static_cast<int64>(items) * blocks * kScaleBytes;
      if constexpr (kAbove) above_g += static_cast<int64>(items) * super_blocks() * kAboveBytes;
    }
  }

  // Piece i: chunk i % 2 of run i / 2, whose lowest bit the swizzle flips.
  __device__ __forceinline__ static void store(uint32 tile_s, const Fetched& run, int i) {
    const uint32 at = tile_s + Chunks::shared_distance(i / kStores);
    st_shared_v4(at ^ i % kStores * kChunkBytes, eight_weights<Scalar>(run, i % kStores));
  }
};
