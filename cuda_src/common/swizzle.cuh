// Tiles of 16-bit items in shared memory, in chunks of 8 items (16 bytes), without bank conflicts.
//
// ldmatrix reads one chunk of 8 rows at a time, and a store of loaded rows writes 8 chunks of a row. Both must touch
// all 32 banks once. Therefore the chunk index is XORed with row bits: 3, 2 or 1 of them if 8, 4 or 2 divides the
// number of chunks in a row. With an odd number no XOR is needed: rows are already skewed against the banks. Rows have
// no padding.
#pragma once

#include "mma.cuh"

constexpr int kChunkItems = 8;
constexpr int kChunkBytes = 16;

template <int kRows_, int kChunks_>
struct SwizzledTile {
  static constexpr int kRows = kRows_;
  static constexpr int kChunks = kChunks_;
  static constexpr int kRowBytes = kChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kXorBits = kChunks % 8 == 0 ? 3 : kChunks % 4 == 0 ? 2 : kChunks % 2 == 0 ? 1 : 0;
  static constexpr uint32 kXorMask = (1u << kXorBits) - 1;

  // The bits to XOR with the chunk index in `row`. They repeat every 8 rows.
  __device__ __forceinline__ static constexpr uint32 flip(uint32 row) { return row >> (3 - kXorBits) & kXorMask; }

  __device__ __forceinline__ static uint32 offset(uint32 row, uint32 chunk) {
    return row * kRowBytes + (chunk ^ flip(row)) * kChunkBytes;
  }
};

// A lane's address for ldmatrix, which reads 8 rows of up to four chunks of a tile. Chunks form groups of four. The
// last group may have fewer, and lanes without a chunk of their own use the last one. Groups are counted from
// `first_chunk`, a multiple of four.
template <typename Tile>
struct FragmentAddress {
  static constexpr int kWholeGroups = Tile::kChunks / 4;

  uint32 even, odd;  // addresses of groups 0 and 1: with three XOR bits the swizzle depends on the parity
  uint32 tail;

  __device__ __forceinline__ FragmentAddress(uint32 first_chunk = 0) {
    const uint32 row = lane_index() % 8, chunk = first_chunk + lane_index() / 8;
    even = Tile::offset(row, chunk);
    odd = Tile::kXorBits == 3 ? Tile::offset(row, chunk + 4) : even + 4 * kChunkBytes;
    const uint32 last = Tile::kChunks - 1;
    tail = Tile::offset(row, min(kWholeGroups * 4 + chunk, last));
  }

  __device__ __forceinline__ uint32 of_group(int group) const {
    if (group == kWholeGroups) return tail;
    if (Tile::kXorBits < 3) return even + group * (4 * kChunkBytes);
    return (group % 2 ? odd : even) + group / 2 * (8 * kChunkBytes);
  }
};
