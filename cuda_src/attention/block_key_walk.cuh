// Which key tiles a CTA of query rows walks, and in which order: those of key_walk.cuh, or what a call's block mask leaves
// of them (block_lists.cuh).
#pragma once

#include "block_lists.cuh"
#include "key_walk.cuh"

// Of a tile of query rows.
template <int kTileQ, int kTileK>
__device__ __forceinline__ const uint2* list_of_rows(const BlockLists& lists, const Place& place) {
  const int own_tiles = div_up(lists.queries(), kTileQ), walked = div_up(lists.keys(), kTileK);
  return lists.of(place.batch, place.head, place.first_row / kTileQ, own_tiles, walked);
}

// As KeyWalk, which see.
template <int kTileQ, int kTileK>
struct BlockKeyWalk {
  BlockTiles blocks;
  BlockTile first;
  int masked;
  int full_begin, full_end;  // tiles that the window leaves whole

  __device__ __forceinline__ BlockKeyWalk(const KeyWindow& window, const Place& place, int rows,
                                          const BlockLists& lists) {
    const KeyWalk<kTileK> seen(window, place.first_row, rows);
    blocks = BlockTiles(list_of_rows<kTileQ, kTileK>(lists, place), div_up(lists.keys(), kTileK), seen.begin, seen.end,
                        seen.full_begin, seen.full_end);
    full_begin = seen.full_begin;
    full_end = seen.full_end;
    first = blocks.at(0);
    masked = min(max(1, blocks.masked), blocks.all);  // rows need a maximum
  }

  // Whether the window hides scores of a tile.
  __device__ __forceinline__ bool cuts(int tile) const { return tile < full_begin || tile >= full_end; }
  __device__ __forceinline__ int tiles() const { return blocks.all; }
  __device__ __forceinline__ BlockTile after(const BlockTile& tile) const { return blocks.at(tile.number + 1); }
  __device__ __forceinline__ BlockTile whole_after(const BlockTile& tile) const {
    return blocks.whole_at(tile.number + 1);
  }
};

template <int kTileQ, int kTileK>
__device__ __forceinline__ KeyWalk<kTileK> walk_of_keys(const KeyWindow& window, const Place& place, int rows,
                                                        NoBlocks) {
  return {window, place.first_row, rows};
}
template <int kTileQ, int kTileK>
__device__ __forceinline__ BlockKeyWalk<kTileQ, kTileK> walk_of_keys(const KeyWindow& window, const Place& place,
                                                                     int rows, const BlockLists& lists) {
  return {window, place, rows, lists};
}

// The CTAs of a head in the order of their work.
template <int kTileQ, int kTileK>
__device__ __forceinline__ Place in_order_of_work(const Place& place, NoBlocks) {
  return place;
}
template <int kTileQ, int kTileK>
__device__ __forceinline__ Place in_order_of_work(Place place, const BlockLists& lists) {
  place.first_row = static_cast<int>(list_of_rows<kTileQ, kTileK>(lists, place)[1].x) * kTileQ;
  return place;
}
