// Which query tiles a CTA of keys walks: those of query_walk.cuh, or what a call's block mask leaves of them
// (block_bits.cuh).
#pragma once

#include "backward_params.cuh"
#include "block_bits.cuh"
#include "query_walk.cuh"

// Head after head of a group, of each those that need a mask first.
template <int kTileQ>
struct BlockQueryWalk {
  struct Tile {
    int head, tile;
  };

  QueryWalk<kTileQ> whole;
  const uint32* words_g;  // of the first head
  int64 head_words;       // from head to head
  int words, first_head, behind_heads;
  BlockTiles tiles_of_head;  // of the head where the walk is
  int present_head = -1;

  __device__ __forceinline__ BlockQueryWalk(const AttentionParams& params, const KeyWindow& window,
                                            const KeyPlace& place, int keys, const BlockBits& bits)
      : whole(window, place.first_key, keys, params.sq),
        words(div_up(div_up(bits.queries(), kTileQ), 32)),
        first_head(place.kv_head * params.group),
        behind_heads(first_head + params.group) {
    const int own = place.first_key / keys, own_tiles = div_up(bits.keys(), keys);
    words_g = bits.of(place.batch, first_head, own, own_tiles, words);
    head_words = bits.of(place.batch, first_head + 1, own, own_tiles, words) - words_g;
  }

  __device__ __forceinline__ int tiles() const {
    int all = 0;
    for (int head = first_head; head < behind_heads; head++) {
      const BlockTiles tiles = of(head);
      all += tiles.count(true) + tiles.count(false);
    }
    return all;
  }
  // The first tile from a head on; behind the last one comes behind_heads.
  __device__ __forceinline__ Tile from(int head) {
    for (; head < behind_heads; head++) {
      const int tile = turn_to(head).first();
      if (tile < whole.end) return {head, tile};
    }
    return {behind_heads, 0};
  }
  __device__ __forceinline__ Tile after(Tile at) {
    const int tile = turn_to(at.head).after(at.tile);
    return tile < whole.end ? Tile{at.head, tile} : from(at.head + 1);
  }
  __device__ __forceinline__ bool masked(Tile at) { return !turn_to(at.head).is_full(at.tile); }

 private:
  __device__ __forceinline__ const BlockTiles& turn_to(int head) {
    if (head != present_head) tiles_of_head = of(head), present_head = head;
    return tiles_of_head;
  }
  __device__ __forceinline__ BlockTiles of(int head) const {
    return {
        words_g + (head - first_head) * head_words, words, whole.begin, whole.end, whole.full_begin, whole.full_end};
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
                                                                  int keys, const BlockBits& bits) {
  return {params, window, place, keys, bits};
}
