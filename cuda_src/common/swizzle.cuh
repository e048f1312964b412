// Tiles of 16-bit items in shared memory, addressed in chunks of 8 items (16 bytes), without bank conflicts.
//
// ldmatrix reads 8 rows of one chunk at a time, a store of fetched rows 8 chunks of a row: both must touch all 32 banks
// once.
// The chunk index is therefore XORed with row bits, as many as divide the number of chunks in a row; with an odd number
// the rows are skewed against the banks by themselves. No row is padded.
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

  // What is XORed into the chunk index in `row`. It repeats every 8 rows.
  __device__ __forceinline__ static constexpr uint32 flip(uint32 row) { return row >> (3 - kXorBits) & kXorMask; }

  __device__ __forceinline__ static uint32 offset(uint32 row, uint32 chunk) {
    return row * kRowBytes + (chunk ^ flip(row)) * kChunkBytes;
  }
};

// Where a lane points ldmatrix at, to read 8 rows of up to four chunks of a tile. Chunks go in groups of four; the last
// group may have fewer, and lanes without a chunk of their own repeat the last one.
template <typename Tile>
struct FragmentAddress {
  static constexpr int kWholeGroups = Tile::kChunks / 4;
  static constexpr int kTailChunks = Tile::kChunks % 4;

  uint32 even, odd;  // of groups 0 and 1: with three XOR bits a group's parity takes part in the swizzle
  uint32 tail;

  __device__ __forceinline__ FragmentAddress() {
    const uint32 row = lane_index() % 8, chunk = lane_index() / 8;
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
