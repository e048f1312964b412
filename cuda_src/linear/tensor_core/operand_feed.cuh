// The way of an operand: global memory to registers, and k-tiles later from there to shared memory.
//
// A thread owns pieces of one chunk (8 items): those of every kPassLines-th line, in kGroups groups of neighbouring lanes'
// chunks. Where there is no row (or column) any more, the last one is read again: what becomes of it is not stored. Items
// of the sum beyond the array are zeros; the first k-tile has them, all others are whole.
#pragma once

#include "../../common/numeric.cuh"
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

template <bool kFirst, typename First, typename Second>
struct Either {
  using Type = First;
};
template <typename First, typename Second>
struct Either<false, First, Second> {
  using Type = Second;
};

// How the chunks of a tile are shared out among kThreads threads. Of a line whose halves are stored together (kTogether is
// 2) a thread owns neighbouring chunks: one of the gate, one of up.
template <typename Tile_, typename Outer_, typename Inner_, int kThreads, int kTogether_ = 1>
struct Chunks {
  using Tile = Tile_;
  using Outer = Outer_;  // the axis of rows of A, or of columns of B
  using Inner = Inner_;  // that of the sum
  using Swizzled = typename Tile::Swizzled;
  static constexpr int kTogether = kTogether_;

  // Eight lanes that store together must touch every bank once: 128 bytes of one line, or of two.
  static constexpr int kLineLanes = Swizzled::kChunks / kTogether;
  static constexpr int kLanes = kLineLanes < 8 / kTogether ? kLineLanes : 8 / kTogether;
  static constexpr int kPassLines = kThreads / kLanes;
  static constexpr int kPasses = Swizzled::kRows / kPassLines;
  static constexpr int kGroups = kLineLanes / kLanes;
  static constexpr int kCount = kPasses * kGroups;                   // pieces that a thread loads and stores
  static constexpr int kInnerItems = Tile::kInner / Inner::kHalves;  // of each half
  static_assert(kPasses * kPassLines == Swizzled::kRows && kPassLines % 8 == 0, "whole passes, and whole swizzles");
  static_assert(kGroups * kLanes * kTogether == Swizzled::kChunks, "whole groups");

  // Of this thread's piece i, within the tile: its line, and its first place along that.
  __device__ __forceinline__ static int line(int i) { return i / kGroups * kPassLines + threadIdx.x / kLanes; }
  __device__ __forceinline__ static int place(int i) {
    return (i % kGroups * kLanes + threadIdx.x % kLanes) * (kTogether * kChunkItems);
  }

  // In shared memory: of piece 0, and from there to piece i.
  __device__ __forceinline__ static uint32 shared_offset() { return Swizzled::offset(line(0), place(0) / kChunkItems); }
  __device__ __forceinline__ static constexpr uint32 shared_distance(int i) {
    return i / kGroups * kPassLines * Swizzled::kRowBytes + i % kGroups * kLanes * (kTogether * kChunkBytes);
  }
};

// One array as an operand: where the present k-tile begins, and this thread's pieces of it.
template <typename Chunks_, int kVec>
struct ArrayFeed {
  using Chunks = Chunks_;
  using Tile = typename Chunks::Tile;
  using Outer = typename Chunks::Outer;
  using Inner = typename Chunks::Inner;
  using LineAxis = typename Either<Tile::kAlong, Outer, Inner>::Type;   // from line to line
  using PlaceAxis = typename Either<Tile::kAlong, Inner, Outer>::Type;  // along a line
  using Quad = uint4;
  static constexpr int kCount = Chunks::kCount;

  // Uniform: the lowest address of the k-tile's lines, so that the offsets from there have no sign. A uniform base plus
  // an unsigned offset of 32 bits is one addressing mode.
  const char* tile_g;
  int64 item_bytes;  // from one item of the sum (in each half) to the next
  int outer_items;  // of each half, that exist from the tile's first on
  uint32 offset[kCount];

  // `first_outer` and `first_inner` are the tile's first items (of each half), the lengths those of one half.
  __device__ __forceinline__ ArrayFeed(const float16* array_g, int64 stride, int first_outer, int outer_length,
                                       int first_inner, int inner_length)
      : item_bytes((Tile::kAlong ? 1 : stride) * static_cast<int64>(sizeof(float16))),
        outer_items(outer_length - first_outer) {
    const int64 first_line = Tile::kAlong ? first_outer : first_inner;
    const int64 first_place = Tile::kAlong ? first_inner : first_outer;
    const int64 half_place = Tile::kAlong ? inner_length : outer_length;
    const int64 half_line = LineAxis::kPaired ? (Tile::kAlong ? outer_length : inner_length) * stride : 0;
    const int last_line = Tile::kAlong ? min(Tile::kOuter / Outer::kHalves, outer_items) - 1 : Chunks::kInnerItems - 1;
    const int lowest = stride < 0 ? last_line : 0;
    const int64 lowest_half = half_line < 0 ? half_line : 0;
    tile_g = reinterpret_cast<const char*>(array_g + first_place + (first_line + lowest) * stride + lowest_half);
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int last_place = Tile::kAlong ? Tile::kInner : (outer_items - 1) / kChunkItems * kChunkItems;
      const int line = min(LineAxis::item(Chunks::line(i)), last_line);
      const int place = min(PlaceAxis::item(Chunks::place(i)), last_place);
      const int64 items = (line - lowest) * stride + LineAxis::half(Chunks::line(i)) * half_line - lowest_half + place +
                          PlaceAxis::half(Chunks::place(i)) * half_place;
      offset[i] = static_cast<uint32>(items * sizeof(float16));
    }
  }

  // Piece i, `ahead` k-tiles before or behind the present one, of which `valid` items of the sum exist (in each half):
  // all or none, unless it is ragged. Where it does not exist, the quad stays as it is. `displacement` leads, in bytes, to
  // the same piece of the other half.
  template <bool kRagged>
  __device__ __forceinline__ void load(Quad& quad, int i, int ahead, int valid, int64 displacement = 0) const {
    const char* piece_g = tile_g + (displacement + ahead * Chunks::kInnerItems * item_bytes) + offset[i];
    const int inner = kRagged ? Inner::item(Tile::kAlong ? Chunks::place(i) : Chunks::line(i)) : 0;
    if constexpr (kVec == kChunkItems) {
      ld_global_v4_if(quad, piece_g, inner < valid);
    } else if (inner < valid) {
      const int outer_left = outer_items - Outer::item(Chunks::place(i));
      quad = load_items(piece_g, !Tile::kAlong ? outer_left : kRagged ? valid - inner : kChunkItems);
    }
  }

  __device__ __forceinline__ void advance(int items) { tile_g += items * item_bytes; }

  __device__ __forceinline__ static void store(uint32 tile_s, const Quad& quad, int i) {
    st_shared_v4(tile_s + Chunks::shared_distance(i), quad);
  }
};
