// Which key tiles a CTA of query rows walks, and in which order: those of key_walk.cuh, or what a call's block mask leaves
// of them (block_bits.cuh).
#pragma once

#include "block_bits.cuh"
#include "key_walk.cuh"

// As KeyWalk, which see.
template <int kTileQ, int kTileK>
struct BlockKeyWalk {
  BlockTiles blocks;
  int first, masked, all;

  __device__ __forceinline__ BlockKeyWalk(const KeyWindow& window, const Place& place, int rows,
                                          const BlockBits& bits) {
    const KeyWalk<kTileK> whole(window, place.first_row, rows);
    const KeyRange top = window.of_row(place.first_row), bottom = window.of_row(place.first_row + rows - 1);
    const int words = div_up(div_up(bits.keys(), kTileK), 32), own_tiles = div_up(bits.queries(), kTileQ);
    blocks = BlockTiles(bits.of(place.batch, place.head, place.first_row / kTileQ, own_tiles, words), words,
                        whole.begin, whole.end, div_up(bottom.begin, kTileK), top.end / kTileK);
    first = blocks.first();
    masked = blocks.count(/*full=*/false);
    all = masked + blocks.count(true);
    if (all > 0) masked = max(1, masked);  // rows need a maximum
  }

  __device__ __forceinline__ int tiles() const { return all; }
  __device__ __forceinline__ int after(int tile) const { return blocks.after(tile); }
};

template <int kTileQ, int kTileK>
__device__ __forceinline__ KeyWalk<kTileK> walk_of_keys(const KeyWindow& window, const Place& place, int rows,
                                                        NoBlocks) {
  return {window, place.first_row, rows};
}
template <int kTileQ, int kTileK>
__device__ __forceinline__ BlockKeyWalk<kTileQ, kTileK> walk_of_keys(const KeyWindow& window, const Place& place,
                                                                     int rows, const BlockBits& bits) {
  return {window, place, rows, bits};
}
