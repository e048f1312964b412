// Positions of a warp's tiles of keys: block ids are fetched one a lane, for 32 tiles at once, and 32 tiles ahead.
#pragma once

#include "params.cuh"

// The first slot of a tile in the caches; of dense keys a sequence is one block.
struct KeyTilePosition {
  int block, token;
};

// The positions of the tiles `first`, `first + step`, ... of one sequence, `count` in all. Nothing else of its table is
// read.
struct BlockFeed {
  const int* table_g;  // of the sequence
  int64 table_block;
  int first, step, count, block_tiles;
  KeyTilePosition now, ahead;  // of lane i: tile i of the present 32, and of the next

  __device__ __forceinline__ BlockFeed(const DecodeParams& params, const int* block_table_g, int batch, int first_,
                                       int step_, int count_)
      : table_g(block_table_g + batch * params.table_batch),
        table_block(params.table_block),
        first(first_),
        step(step_),
        count(count_),
        block_tiles(params.block_tiles) {
    if (count > 0) now = fetch(0);
    if (count > kWarpSize) ahead = fetch(kWarpSize);
  }

  __device__ __forceinline__ int tile(int j) const { return first + j * step; }
  // Of what is loaded: in a block a tile is whole.
  __device__ __forceinline__ int first_key(int j) const { return tile(j) * kTileKeys; }

  // In order from 0: all lanes ask for the same one.
  __device__ __forceinline__ KeyTilePosition position(int j) {
    const int lane = j % kWarpSize;
    if (j > 0 && lane == 0) {
      now = ahead;
      if (j + kWarpSize < count) ahead = fetch(j + kWarpSize);
    }
    return {__shfl_sync(kFullWarp, now.block, lane), __shfl_sync(kFullWarp, now.token, lane)};
  }

 private:
  __device__ __forceinline__ KeyTilePosition fetch(int j) const {
    const int mine = tile(min(j + lane_index(), count - 1));
    return {table_g[mine / block_tiles * table_block], mine % block_tiles * kTileKeys};
  }
};

// The distance of a tile from the first of all. Blocks and tokens are not negative: without a sign to extend, a product
// is two instructions.
__device__ __forceinline__ int64 tile_offset(const Strides& strides, const KeyTilePosition& position) {
  return static_cast<int64>(static_cast<uint64>(static_cast<uint32>(position.block)) * strides.batch +
                            static_cast<uint64>(static_cast<uint32>(position.token)) * strides.seq);
}

// A lane's first row of a tile, and its first item there.
struct LaneCoordinates {
  int row, item;
};

// Positions of a warp's tiles of keys in dense arrays: one after the other, without a table.
//
// If Sk is no multiple of a tile, the last tile begins earlier, so that its rows end with the array: what it shares
// with the tile before is masked. Loads thereby need no predicates. Sk is one tile at least.

struct DenseFeed {
  int batch, first, step, count, last_key;  // at which a tile may begin

  __device__ __forceinline__ DenseFeed(const DecodeParams& params, const int*, int batch_, int first_, int step_,
                                       int count_)
      : batch(batch_), first(first_), step(step_), count(count_), last_key(params.attention.sk - kTileKeys) {}

  __device__ __forceinline__ int tile(int j) const { return first + j * step; }
  __device__ __forceinline__ int first_key(int j) const { return min(tile(j) * kTileKeys, last_key); }
  __device__ __forceinline__ KeyTilePosition position(int j) const { return {batch, first_key(j)}; }
};
