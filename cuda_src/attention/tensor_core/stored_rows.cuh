// A thread's share of a tile of a paged cache between global and shared memory: chunks of rows as the cache keeps them.
// Of integers each row has a scale too, and items become float16 before they are stored.
#pragma once

#include "../stored_items.cuh"
#include "tile_feed.cuh"

template <typename Item, typename TileFeed>
struct ScaledRows {
  StoredItems<Item, kChunkItems> chunks[TileFeed::kQuads];
  float scales[TileFeed::kPasses];
};

template <typename Item, typename TileFeed>
struct StoredRows {
  using Type = ScaledRows<Item, TileFeed>;
};
template <typename TileFeed>
struct StoredRows<float16, TileFeed> {
  using Type = uint4[TileFeed::kQuads];
};

template <typename TileFeed, int kQuads>
__device__ __forceinline__ void store_rows(const TileFeed& feed, uint32 tile_s, const uint4 (&quads)[kQuads]) {
  feed.store(tile_s, quads);
}
template <typename TileFeed, typename Item>
__device__ __forceinline__ void store_rows(const TileFeed& feed, uint32 tile_s,
                                           const ScaledRows<Item, TileFeed>& rows) {
  feed.store_made(tile_s, [&](int pass, int group) {
    return as_halves(rows.chunks[pass * TileFeed::kColumnGroups + group], rows.scales[pass]);
  });
}

// As of float16: kVec is 8 where rows are aligned to a chunk, otherwise 1.
template <int kCols, int kVec, typename Item>
__device__ __forceinline__ void load_chunk(StoredItems<Item, kChunkItems>& items, const void* chunk_g, int chunk) {
  if constexpr (kVec == kChunkItems) {
    items.load(chunk_g);
  } else {
    items.load_bytes(chunk_g, (kCols - chunk * kChunkItems) * StoredFormat<Item>::kBits / 8);
  }
}
