// Which query tiles a CTA of keys walks: those of key_walk.cuh, or what a call's block mask leaves of them
// (block_lists.cuh).
#pragma once

#include "backward_params.cuh"
#include "block_lists.cuh"
#include "key_walk.cuh"

// Head after head of a group those that need a mask, then head after head those that are seen in full. It is asked for one
// tile after the other. Each stands in a run of its list; the runs of a head are worked out anew when the walk comes to
// them: kept for that, they would wait in registers.
template <int kTileQ>
struct BlockQueryWalk {
  struct Tile {
    int head;  // behind the last tile the one behind all of the group
    int tile;
    uint32 states;
  };

  QueryWalk<kTileQ> seen;
  const uint2* list_g;  // of the first head
  int64 head_items;     // from head to head
  int walked, first_head, behind_heads;
  int all = 0, whole = 0;  // tiles of all heads, and those that are seen in full

  __device__ __forceinline__ BlockQueryWalk(const AttentionParams& params, const KeyWindow& window,
                                            const KeyPlace& place, int keys, const BlockLists& lists)
      : seen(window, place.first_key, keys, params.sq),
        walked(div_up(lists.queries(), kTileQ)),
        first_head(place.kv_head * params.group),
        behind_heads(first_head + params.group),
        head(first_head) {
    const int own = place.first_key / keys, own_tiles = div_up(lists.keys(), keys);
    list_g = lists.of(place.batch, first_head, own, own_tiles, walked);
    head_items = lists.of(place.batch, first_head + 1, own, own_tiles, walked) - list_g;
#pragma unroll 1
    for (int each = first_head; each < behind_heads; each++) {
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
  // Where a run has ended, on to the next one that has tiles. Behind the last one all tiles are behind_heads'.
  __device__ __forceinline__ void turn() {
#pragma unroll 1
    while (left == 0) {
      if (run < kBehindRun) {
        run++;
      } else {
        head++;
        if (run == kBehindRun) run = kPartialRun;
        if (head == behind_heads && run == kPartialRun) head = first_head, run = kWholeRun;
      }
      const bool ended = head == behind_heads;
      const BlockTiles tiles = tiles_of(ended ? first_head : head);
      left = ended ? kFar : tiles.in_run(run);
      item_g = tiles.list_g + (ended ? 0 : tiles.first_item(run));
      step = ended ? 0 : run == kPartialRun ? 1 : -1;
    }
  }
  // Whether the window hides scores of a tile.
  __device__ __forceinline__ bool masked(int tile) const { return seen.masked(tile); }

 private:
  // Of a head, in this order: the partial tiles, the full ones before and behind those that the window leaves whole, and
  // these.
  static constexpr int kNoRun = -1, kPartialRun = 0, kBehindRun = 2, kWholeRun = 3;

  int head, run = kNoRun, left = 0;  // tiles of the run that are to come
  const uint2* item_g = nullptr;     // the next one
  int step = 0;

  __device__ __forceinline__ BlockTiles tiles_of(int of_head) const {
    return {list_g + (of_head - first_head) * head_items, walked, seen.begin, seen.end, seen.full_begin, seen.full_end};
  }
};

// `keys` keys of a CTA.
template <int kTileQ>
__device__ __forceinline__ QueryWalk<kTileQ> walk_of_queries(const AttentionParams& params, const KeyWindow& window,
                                                             const KeyPlace& place, int keys, NoBlocks) {
  return {window, place.first_key, keys, params.sq};
}
template <int kTileQ>
__device__ __forceinline__ BlockQueryWalk<kTileQ> walk_of_queries(const AttentionParams& params,
                                                                  const KeyWindow& window, const KeyPlace& place,
                                                                  int keys, const BlockLists& lists) {
  return {params, window, place, keys, lists};
}

// The CTAs of a key-value head in the order of their work.
template <int kTileQ>
__device__ __forceinline__ KeyPlace in_order_of_work(const AttentionParams&, const KeyPlace& place, int, NoBlocks) {
  return place;
}
template <int kTileQ>
__device__ __forceinline__ KeyPlace in_order_of_work(const AttentionParams& params, KeyPlace place, int keys,
                                                     const BlockLists& lists) {
  const int own_tiles = div_up(lists.keys(), keys), walked = div_up(lists.queries(), kTileQ);
  const uint2* list_g = lists.of(place.batch, place.kv_head * params.group, place.first_key / keys, own_tiles, walked);
  place.first_key = static_cast<int>(list_g[1].x) * keys;
  return place;
}
