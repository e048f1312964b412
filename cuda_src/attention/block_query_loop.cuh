// The query tiles that a CTA of keys loops over: those of key_loop.cuh, or what a call's block mask leaves of them
// (block_lists.cuh).
#pragma once

#include "backward_params.cuh"
#include "block_lists.cuh"
#include "key_loop.cuh"

// Head after head of a group those that need a mask, then head after head those that are seen in full. It returns
// one tile after the other. Each is in a run of its list; the runs of a head are computed again when the loop comes to
// them: kept for that, they would wait in registers.
template <int kTileQ>
struct BlockQueryLoop {
  struct Tile {
    int head;  // after the last tile, the first head after the group
    int tile;
    uint32 states;
  };

  QueryLoop<kTileQ> seen;
  const uint2* list_g;  // of the first head
  int64 head_items;     // from head to head
  int loop_tiles, first_head, end_head;
  int all = 0, whole = 0;  // tiles of all heads, and those that are seen in full

  __device__ __forceinline__ BlockQueryLoop(const AttentionParams& params, const KeyWindow& window,
                                            const KeyTileCoordinates& coords, int keys, const BlockLists& lists)
      : seen(window, coords.first_key, keys, params.sq),
        loop_tiles(div_up(lists.queries(), kTileQ)),
        first_head(coords.kv_head * params.group),
        end_head(first_head + params.group),
        head(first_head) {
    const int own = coords.first_key / keys, own_tiles = div_up(lists.keys(), keys);
    list_g = lists.of(coords.batch, first_head, own, own_tiles, loop_tiles);
    head_items = lists.of(coords.batch, first_head + 1, own, own_tiles, loop_tiles) - list_g;
#pragma unroll 1
    for (int each = first_head; each < end_head; each++) {
      const BlockTiles tiles = tiles_of(each);
      all += tiles.all;
      whole += tiles.whole;
    }
  }

  __device__ __forceinline__ int tiles() const { return all; }

  // The next tile of the run.
  __device__ __forceinline__ Tile take() {
    const uint2 listed = *item_g;
    item_g += step;
    left--;
    return {head, static_cast<int>(listed.x), listed.y};
  }
  __device__ __forceinline__ bool in_run() const { return left > 0; }
  // At the end of a run, move on to the next one that has tiles. After the last one all tiles are of end_head.
  __device__ __forceinline__ void next_run() {
#pragma unroll 1
    while (left == 0) {
      if (run < kAfterRun) {
        run++;
      } else {
        head++;
        if (run == kAfterRun) run = kPartialRun;
        if (head == end_head && run == kPartialRun) head = first_head, run = kWholeRun;
      }
      const bool ended = head == end_head;
      const BlockTiles tiles = tiles_of(ended ? first_head : head);
      left = ended ? kFar : tiles.in_run(run);
      item_g = tiles.list_g + (ended ? 0 : tiles.first_item(run));
      step = ended ? 0 : run == kPartialRun ? 1 : -1;
    }
  }
  // Whether the window hides some scores of a tile.
  __device__ __forceinline__ bool masked(int tile) const { return seen.masked(tile); }

 private:
  // The runs of a head, in this order: the partial tiles, the full ones before and after those that the window leaves
  // whole, and these.
  static constexpr int kNoRun = -1, kPartialRun = 0, kAfterRun = 2, kWholeRun = 3;

  int head, run = kNoRun, left = 0;  // tiles of the run that are to come
  const uint2* item_g = nullptr;     // the next one
  int step = 0;

  __device__ __forceinline__ BlockTiles tiles_of(int of_head) const {
    return {
        list_g + (of_head - first_head) * head_items, loop_tiles, seen.begin, seen.end, seen.full_begin, seen.full_end};
  }
};

// `keys` keys of a CTA.
template <int kTileQ>
__device__ __forceinline__ QueryLoop<kTileQ> loop_over_queries(const AttentionParams& params, const KeyWindow& window,
                                                               const KeyTileCoordinates& coords, int keys, NoBlocks) {
  return {window, coords.first_key, keys, params.sq};
}
template <int kTileQ>
__device__ __forceinline__ BlockQueryLoop<kTileQ> loop_over_queries(const AttentionParams& params,
                                                                    const KeyWindow& window,
                                                                    const KeyTileCoordinates& coords, int keys,
                                                                    const BlockLists& lists) {
  return {params, window, coords, keys, lists};
}

// The CTAs of a key-value head, those with the most work first.
template <int kTileQ>
__device__ __forceinline__ KeyTileCoordinates in_order_of_work(const AttentionParams&, const KeyTileCoordinates& coords,
                                                               int, NoBlocks) {
  return coords;
}
template <int kTileQ>
__device__ __forceinline__ KeyTileCoordinates in_order_of_work(const AttentionParams& params, KeyTileCoordinates coords,
                                                               int keys, const BlockLists& lists) {
  const int own_tiles = div_up(lists.keys(), keys), loop_tiles = div_up(lists.queries(), kTileQ);
  const uint2* list_g =
      lists.of(coords.batch, coords.kv_head * params.group, coords.first_key / keys, own_tiles, loop_tiles);
  coords.first_key = static_cast<int>(list_g[1].x) * keys;
  return coords;
}
