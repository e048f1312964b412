// Where a warp's tiles of keys lie in dense arrays: one behind the other, with no table between.
//
// Where Sk is no multiple of a tile the last tile begins earlier, so that its rows end with the array: what it shares
// with the tile before is masked. Loads thereby need no predicates. Sk is one tile at least.
#pragma once

#include "block_feed.cuh"

struct DenseFeed {
  int batch, first, step, count, last_key;  // at which a tile may begin

  __device__ __forceinline__ DenseFeed(const DecodeParams& params, const int*, int batch_, int first_, int step_,
                                       int count_)
      : batch(batch_), first(first_), step(step_), count(count_), last_key(params.attention.sk - kTileKeys) {}

  __device__ __forceinline__ int tile(int j) const { return first + j * step; }
  __device__ __forceinline__ int first_key(int j) const { return min(tile(j) * kTileKeys, last_key); }
  __device__ __forceinline__ TilePlace place(int j) const { return {batch, first_key(j)}; }
};
