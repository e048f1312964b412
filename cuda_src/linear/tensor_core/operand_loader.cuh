// The tile loader of an operand: from global memory to registers, and k-tiles later from there to shared memory.
//
// A thread owns pieces of one chunk (8 items): those of every kPassLines-th line, in kGroups groups of neighbouring
// lanes' chunks. Rows (or columns) beyond the last one read the last one again, and their results are not stored. Items
// of the sum beyond the array are zeros; the first k-tile has them, all others are whole.
#pragma once

#include "../../common/numeric.cuh"
#include "../../common/streaming.cuh"
#include "operand_tile.cuh"
#include "params.cuh"

// Eight items at `source`, of which `valid` exist, one by one.
__device__ __forceinline__ uint4 load_items(const char* source, int valid) {
  const uint16* items_g = reinterpret_cast<const uint16*>(source);
  uint32 item[kChunkItems];
#pragma unroll
  for (int i = 0; i < kChunkItems; i++) item[i] = i < valid ? items_g[i] : 0;
  return make_uint4(item[0] | item[1] << 16, item[2] | item[3] << 16, item[4] | item[5] << 16, item[6] | item[7] << 16);
}

// The division of the chunks of a tile among kThreads threads.
template <typename Tile_, typename Outer_, int kThreads>
struct Chunks {
  using Tile = Tile_;
  using Outer = Outer_;  // the axis of rows of A, or of columns of B
  using Swizzled = typename Tile::Swizzled;

  // Eight lanes that store together must touch every bank once: 128 bytes, of one line or of several.
  static constexpr int kLanes = Swizzled::kChunks < 8 ? Swizzled::kChunks : 8;
  static constexpr int kPassLines = kThreads / kLanes;
  static constexpr int kPasses = Swizzled::kRows / kPassLines;
  static constexpr int kGroups = Swizzled::kChunks / kLanes;
  static constexpr int kCount = kPasses * kGroups;  // pieces that a thread loads and stores
  static_assert(kPasses * kPassLines == Swizzled::kRows && kPassLines % 8 == 0, "whole passes, and whole swizzles");
  static_assert(kGroups * kLanes == Swizzled::kChunks, "whole groups");

  // This thread's piece i within the tile: its line, and its first position along the line.
  __device__ __forceinline__ static int line(int i) { return i / kGroups * kPassLines + threadIdx.x / kLanes; }
  __device__ __forceinline__ static int place(int i) {
    return (i % kGroups * kLanes + threadIdx.x % kLanes) * kChunkItems;
  }

  // Offsets in shared memory: of piece 0, and from there to piece i.
  __device__ __forceinline__ static uint32 shared_offset() { return Swizzled::offset(line(0), place(0) / kChunkItems); }
  __device__ __forceinline__ static constexpr uint32 shared_distance(int i) {
    return i / kGroups * kPassLines * Swizzled::kRowBytes + i % kGroups * kLanes * kChunkBytes;
  }
};

// One array as an operand: the start of the current k-tile, and this thread's pieces of it.
template <typename Chunks_, int kVec>
struct ArrayLoader {
  using Chunks = Chunks_;
  using Tile = typename Chunks::Tile;
  using Outer = typename Chunks::Outer;
  using Fetched = uint4;                 // a piece as it is stored
  static constexpr bool kCopied = true;  // by cp.async, if the product is native
  static constexpr int kFetches = Chunks::kCount, kStores = 1;
  static constexpr int kOuterItems = Tile::kOuter / Outer::kHalves;

  // Uniform: the lowest address of the k-tile's lines, so that the offsets from there have no sign. A uniform base plus
  // an unsigned offset of 32 bits is one addressing mode.
  const char* tile_g;
  int64 item_bytes;  // from one item of the sum to the next
  int outer_items;   // of each half, that exist from the tile's first on
  uint32 offset[kFetches];

  // `stride` leads from line to line, in items. The tile's first rows (or columns) are `first_outer` of `outer_length`,
  // of each half; its first item of the sum is `first_inner`.
  template <typename Scalar>
  __device__ __forceinline__ ArrayLoader(const Scalar* array_g, int64 stride, int first_outer, int outer_length,
                                         int first_inner)
      : item_bytes((Tile::kAlong ? 1 : stride) * static_cast<int64>(sizeof(Scalar))),
        outer_items(outer_length - first_outer) {
    static_assert(sizeof(Scalar) == sizeof(uint16), "chunks of 8 items");
    // From the first half to the second.
    const int64 half = static_cast<int64>(outer_length) * (Tile::kAlong ? stride : 1);
    const int64 first_half = Outer::kPaired && half < 0 ? half : 0;
    const int last_line = Tile::kAlong ? min(kOuterItems, outer_items) - 1 : Tile::kInner - 1;
    const int last_chunk = (outer_items - 1) / kChunkItems * kChunkItems;
    const int lowest = stride < 0 ? last_line : 0;
    const int64 line = Tile::kAlong ? first_outer : first_inner, place = Tile::kAlong ? first_inner : first_outer;
    tile_g = reinterpret_cast<const char*>(array_g + place + (line + lowest) * stride + first_half);
#pragma unroll
    for (int i = 0; i < kFetches; i++) {
      const int outer = Tile::kAlong ? Chunks::line(i) : Chunks::place(i);
      const int item = min(Outer::item(outer), Tile::kAlong ? last_line : last_chunk);
      const int of_line = Tile::kAlong ? item : Chunks::line(i), along = Tile::kAlong ? Chunks::place(i) : item;
      const int64 items = (of_line - lowest) * stride + along + Outer::half(outer) * half - first_half;
      offset[i] = static_cast<uint32>(items * sizeof(Scalar));
    }
  }

  // Load piece i, `ahead` k-tiles from the current one, of which `valid` items of the sum exist: all or none, unless it
  // is ragged. If none exists, the quad stays as it is.
  template <bool kRagged>
  __device__ __forceinline__ void load(uint4& quad, int i, int ahead, int valid) const {
    const char* piece_g = tile_g + ahead * Tile::kInner * item_bytes + offset[i];
    const int inner = !kRagged ? 0 : Tile::kAlong ? Chunks::place(i) : Chunks::line(i);
    if constexpr (kVec == kChunkItems) {
      ld_global_v4_if(quad, piece_g, inner < valid);
    } else if (inner < valid) {
      const int outer_left = outer_items - Outer::item(Chunks::place(i));
      quad = load_items(piece_g, !Tile::kAlong ? outer_left : kRagged ? valid - inner : kChunkItems);
    }
  }

  // Copy piece i of the current k-tile, from sm_80 on: it is zeros unless all of it exists.
  __device__ __forceinline__ void copy(uint32 tile_s, int i, int valid) const {
    static_assert(kVec == kChunkItems, "cp.async copies whole chunks");
    const int inner = Tile::kAlong ? Chunks::place(i) : Chunks::line(i);
    cp_async_16(tile_s + Chunks::shared_distance(i), tile_g + offset[i], inner < valid);
  }

  __device__ __forceinline__ void advance(int items) { tile_g += items * item_bytes; }

  __device__ __forceinline__ static void store(uint32 tile_s, const uint4& quad, int i) {
    st_shared_v4(tile_s + Chunks::shared_distance(i), quad);
  }
};

// An array of any strides as an operand, item by item: a line follows the smaller stride, so that most accesses of a
// warp are neighbours. Interface as ArrayLoader.
template <typename Chunks_>
struct StridedLoader {
  using Chunks = Chunks_;
  using Tile = typename Chunks::Tile;
  using Fetched = uint4;
  static constexpr int kFetches = Chunks::kCount, kStores = 1;

  const uint16* tile_g;            // the first item of the current k-tile
  int64 line_stride, item_stride;  // from line to line, and from item to item of a line
  int outer_items;                 // that exist from the tile's first on

  template <typename Scalar>
  __device__ __forceinline__ StridedLoader(const Scalar* array_g, int64 of_lines, int64 of_items, int first_outer,
                                           int outer_length)
      : tile_g(reinterpret_cast<const uint16*>(array_g) + first_outer * (Tile::kAlong ? of_lines : of_items)),
        line_stride(of_lines),
        item_stride(of_items),
        outer_items(outer_length - first_outer) {}

  template <bool kRagged>
  __device__ __forceinline__ void load(uint4& quad, int i, int ahead, int valid) const {
    const int line = Chunks::line(i), place = Chunks::place(i);
    const int inner = !kRagged ? 0 : Tile::kAlong ? place : line;
    if (inner < valid) {
      const int along = kRagged ? valid - place : kChunkItems;
      const int left = !Tile::kAlong ? outer_items - place : line < outer_items ? along : 0;
      const uint16* item_g = tile_g + ahead * Tile::kInner * (Tile::kAlong ? item_stride : line_stride) +
                             line * line_stride + place * item_stride;
      uint32 item[kChunkItems];
#pragma unroll
      for (int j = 0; j < kChunkItems; j++) item[j] = j < left ? item_g[j * item_stride] : 0;
      quad = make_uint4(item[0] | item[1] << 16, item[2] | item[3] << 16, item[4] | item[5] << 16,
                        item[6] | item[7] << 16);
    }
  }

  __device__ __forceinline__ void advance(int items) { tile_g += items * (Tile::kAlong ? item_stride : line_stride); }

  __device__ __forceinline__ static void store(uint32 tile_s, const uint4& quad, int i) {
    st_shared_v4(tile_s + Chunks::shared_distance(i), quad);
  }
};
