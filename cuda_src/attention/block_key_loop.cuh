// The key tiles that a CTA of query rows loops over, and their order: those of key_loop.cuh, or what a call's block
// mask leaves of them (block_lists.cuh).
#pragma once

#include "block_lists.cuh"
#include "key_loop.cuh"

// The list of a tile of query rows.
template <int kTileQ, int kTileK>
__device__ __forceinline__ const uint2* list_of_rows(const BlockLists& lists, const TileCoordinates& coords) {
  const int own_tiles = div_up(lists.queries(), kTileQ), loop_tiles = div_up(lists.keys(), kTileK);
  return lists.of(coords.batch, coords.head, coords.first_row / kTileQ, own_tiles, loop_tiles);
}

// As KeyLoop, which see.
template <int kTileQ, int kTileK>
struct BlockKeyLoop {
  BlockTiles blocks;
  BlockTile first;
  int masked;
  int full_begin, full_end;  // tiles that the window leaves whole

  __device__ __forceinline__ BlockKeyLoop(const KeyWindow& window, const TileCoordinates& coords, int rows,
                                          const BlockLists& lists) {
    const KeyLoop<kTileK> seen(window, coords.first_row, rows);
    blocks = BlockTiles(list_of_rows<kTileQ, kTileK>(lists, coords), div_up(lists.keys(), kTileK), seen.begin, seen.end,
                        seen.full_begin, seen.full_end);
    full_begin = seen.full_begin;
    full_end = seen.full_end;
    first = blocks.at(0);
    masked = min(max(1, blocks.masked), blocks.all);  // rows need a maximum
  }

  // Whether the window hides some scores of a tile.
  __device__ __forceinline__ bool cuts(int tile) const { return tile < full_begin || tile >= full_end; }
  __device__ __forceinline__ int tiles() const { return blocks.all; }
  __device__ __forceinline__ BlockTile after(const BlockTile& tile) const { return blocks.at(tile.number + 1); }
  __device__ __forceinline__ BlockTile whole_after(const BlockTile& tile) const {
    return blocks.whole_at(tile.number + 1);
  }
};

template <int kTileQ, int kTileK>
__device__ __forceinline__ KeyLoop<kTileK> loop_over_keys(const KeyWindow& window, const TileCoordinates& coords,
                                                          int rows, NoBlocks) {
  return {window, coords.first_row, rows};
}
template <int kTileQ, int kTileK>
__device__ __forceinline__ BlockKeyLoop<kTileQ, kTileK> loop_over_keys(const KeyWindow& window,
                                                                       const TileCoordinates& coords, int rows,
                                                                       const BlockLists& lists) {
  return {window, coords, rows, lists};
}

// How the masks of a key tile concern a warp's rows: whether they see anything, whether the window leaves all of it,
// and whether a block mask hides some of it.
struct Seen {
  bool active = true, whole = true, partial = false;
};

// For kRows rows and kKeys keys; `state` is the tile's for these rows. (The key by reference: a value is compared in
// another order, and ptxas makes other code of it.)
template <int kRows, int kKeys>
__device__ __forceinline__ Seen seen_of(const KeyWindow& window, int first_row, const int& first_key, uint32 state) {
  const KeyRange top = window.of_row(first_row), bottom = window.of_row(first_row + kRows - 1);
  return {first_key < bottom.end && first_key + kKeys > top.begin && state != kEmpty,
          first_key + kKeys <= top.end && first_key >= bottom.begin, state == kPartial};
}

// The CTAs of a head, those with the most work first.
template <int kTileQ, int kTileK>
__device__ __forceinline__ TileCoordinates in_order_of_work(const TileCoordinates& coords, NoBlocks) {
  return coords;
}
template <int kTileQ, int kTileK>
__device__ __forceinline__ TileCoordinates in_order_of_work(TileCoordinates coords, const BlockLists& lists) {
  coords.first_row = static_cast<int>(list_of_rows<kTileQ, kTileK>(lists, coords)[1].x) * kTileQ;
  return coords;
}
