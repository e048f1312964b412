// Lists of the tiles of a call's block mask that a CTA loops over: tiles with some hidden scores, and tiles without.
//
// block_lists.cu writes them for the tiles of one kernel, which owns rows (or keys) and loops over tiles of keys (or
// rows). For each matrix of scores and each tile that a CTA owns a list of pairs of words:
//   {partial tiles, full tiles}
//   {a tile that a CTA owns, -}: of the nth list that with the nth most work (block_order.cu)
//   {tile, states} of each partial tile from there on, and of each full one from the end on backwards; both rise
// All threads of a CTA read a pair from one address: so ptxas has in uniform registers what follows from it, as where
// the tile's keys lie, and a loop over full tiles is the loop of a call without a mask.
#pragma once

#include "../common/config.cuh"

// How much a warp's part of an owned tile sees of a tile in the loop.
constexpr uint32 kEmpty = 0, kPartial = 1, kFull = 2;
constexpr int kStateBits = 2;
constexpr uint32 kAllFull = 0xaaaaaaaa;  // of every part

constexpr int kListHead = 2;  // pairs before the tiles
__host__ __device__ constexpr int list_items(int loop_tiles) { return kListHead + loop_tiles; }
__device__ __forceinline__ int partial_item(int number) { return kListHead + number; }
__device__ __forceinline__ int full_item(int number, int loop_tiles) { return list_items(loop_tiles) - 1 - number; }

// For a call without a block mask.
struct NoBlocks {};

struct BlockLists {
  const uint2* items_g;
  // In matrices, from batch element to batch element and from head to head; and the queries and keys of a matrix, in
  // whole tiles of the block mask. A packed sequence may have fewer.
  const int64* strides;

  __device__ __forceinline__ int queries() const { return strides[2]; }
  __device__ __forceinline__ int keys() const { return strides[3]; }

  // The list of tile `own` of `own_tiles`.
  __device__ __forceinline__ const uint2* of(int batch, int head, int own, int own_tiles, int loop_tiles) const {
    const int64 matrix = batch * strides[0] + head * strides[1];
    return items_g + (matrix * own_tiles + own) * list_items(loop_tiles);
  }
};

// A tile of a list, by its position in the CTA's loop. It converts to the tile's number.
struct BlockTile {
  int tile;
  uint32 states;
  int number;

  __device__ __forceinline__ operator int() const { return tile; }
  __device__ __forceinline__ uint32 state(int part) const { return states >> (kStateBits * part) & (kPartial | kFull); }
};

// How much a part sees of a tile, without a block mask.
__device__ __forceinline__ uint32 state_of(int, int) { return kFull; }
__device__ __forceinline__ uint32 states_of(int) { return kAllFull; }
__device__ __forceinline__ uint32 state_of(const BlockTile& tile, int part) { return tile.state(part); }
__device__ __forceinline__ uint32 states_of(const BlockTile& tile) { return tile.states; }

// The tiles of a list that a window leaves, `begin` to `end`, by their numbers: first those that need a mask
// (key_loop.cuh explains why), the partial ones and the full ones outside `full_begin` to `full_end`, which it cuts.
struct BlockTiles {
  const uint2* list_g;
  int capacity;       // tiles that the loop could have
  int first_partial;  // in the list
  int partials;
  int first_full;
  int edge_before, whole, edge_after;  // full ones, as they follow each other in the list
  int masked, all;

  BlockTiles() = default;
  __device__ __forceinline__ BlockTiles(const uint2* list, int loop_tiles, int begin, int end, int full_begin,
                                        int full_end)
      : list_g(list), capacity(loop_tiles) {
    const int listed_partials = list_g[0].x, listed_fulls = list_g[0].y;
    first_partial = partials_before(begin, listed_partials);
    partials = partials_before(end, listed_partials) - first_partial;
    first_full = fulls_before(begin, listed_fulls);
    const int end_full = fulls_before(end, listed_fulls);
    const int first_whole = min(max(fulls_before(full_begin, listed_fulls), first_full), end_full);
    const int end_whole = min(max(fulls_before(full_end, listed_fulls), first_whole), end_full);
    edge_before = first_whole - first_full;
    whole = end_whole - first_whole;
    edge_after = end_full - end_whole;
    masked = partials + edge_before + edge_after;
    all = masked + whole;
  }

  // After the last one it is repeated.
  __device__ __forceinline__ BlockTile at(int number) const {
    const int asked = max(min(number, all - 1), 0), full = asked - partials;
    const int moved = full < edge_before ? 0 : asked < masked ? whole : -edge_after;
    const uint2 item =
        list_g[full < 0 ? partial_item(first_partial + asked) : full_item(first_full + full + moved, capacity)];
    return {static_cast<int>(item.x), item.y, number};
  }
  // A tile after the masked ones, whose states are known.
  __device__ __forceinline__ BlockTile whole_at(int number) const {
    const int full = min(number, all - 1) - partials - edge_after;
    return {static_cast<int>(list_g[full_item(first_full + full, capacity)].x), kAllFull, number};
  }

  // The list has four runs: partial tiles, and full tiles before, after and among those that the window leaves whole.
  __device__ __forceinline__ int in_run(int run) const {
    return run == 0 ? partials : run == 1 ? edge_before : run == 2 ? edge_after : whole;
  }
  __device__ __forceinline__ int first_item(int run) const {
    if (run == 0) return partial_item(first_partial);
    const int before_run = run == 1 ? 0 : run == 2 ? edge_before + whole : edge_before;
    return full_item(first_full + before_run, capacity);
  }

 private:
  __device__ __forceinline__ int partials_before(int tile, int listed) const {
    return before(tile, listed, [&](int number) { return list_g[partial_item(number)].x; });
  }
  __device__ __forceinline__ int fulls_before(int tile, int listed) const {
    return before(tile, listed, [&](int number) { return list_g[full_item(number, capacity)].x; });
  }
  // How many of the listed tiles come before a tile.
  template <typename TileOf>
  __device__ __forceinline__ int before(int tile, int listed, TileOf tile_of) const {
    if (tile <= 0) return 0;
    if (tile >= capacity) return listed;
    int low = 0, high = listed;
#pragma unroll 1
    while (low < high) {
      const int middle = (low + high) / 2;
      if (static_cast<int>(tile_of(middle)) < tile) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};
