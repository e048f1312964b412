// The query tiles of a packed sequence: as query_feed.cuh, but as packed_key_feed.cuh, which says why, each thread counts
// its items from the first one of the whole array, in 32 bits.
#pragma once

#include "query_feed.cuh"

template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct PackedQueryFeed : QueryFeed<QTileFeed, DoutTileFeed, kBuffers> {
  using Base = QueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
  using Base::kTileQ, Base::params, Base::walk, Base::quads;

  const float16 *q_g, *dout_g;
  int next_q, next_dout;  // items before this thread's first chunk of the next tile

  __device__ __forceinline__ PackedQueryFeed(const BackwardParams& all, const QueryWalk<kTileQ>& seen,
                                             const KeyPlace& place, const float16* q, const float16* dout,
                                             const typename Base::Tiles (&tiles)[kBuffers])
      : Base(all, seen, place, q, dout, tiles), q_g(q), dout_g(dout) {
    const int row = place.query_begin + this->tile * kTileQ;
    next_q = own_item(this->q_feed, row, all.attention.q);
    next_dout = own_item(this->dout_feed, row, all.dout);
  }

  // The first tile, all the way.
  __device__ __forceinline__ void begin() {
    if (this->left == 0) return;
    const int rows = params.attention.sq - this->first_row();
    fetch(this->q_feed, q_g, next_q, params.attention.q, rows);
    this->q_feed.store(this->q_s, quads);
    fetch(this->dout_feed, dout_g, next_dout, params.dout, rows);
    this->dout_feed.store(this->dout_s, quads);
  }
  __device__ __forceinline__ void fetch_q() {
    next_q += step_items(params.attention.q);
    if (this->more()) fetch(this->q_feed, q_g, next_q, params.attention.q, this->next_rows());
  }
  __device__ __forceinline__ void fetch_dout() {
    next_dout += step_items(params.dout);
    if (this->more()) fetch(this->dout_feed, dout_g, next_dout, params.dout, this->next_rows());
  }

 private:
  template <typename Feed>
  __device__ __forceinline__ int own_item(const Feed& feed, int row, const Strides& strides) const {
    return (row + (Feed::kEvenPasses ? feed.key_of_pass(0) : 0)) * static_cast<int>(strides.seq) +
           this->head * static_cast<int>(strides.head) + feed.chunk * kChunkItems;
  }
  __device__ __forceinline__ int step_items(const Strides& strides) const {
    const int tile_items = static_cast<int>(strides.seq) * kTileQ;
    return this->turns() ? static_cast<int>(strides.head) - (walk.tiles() - 1) * tile_items : tile_items;
  }
  template <typename Feed>
  __device__ __forceinline__ void fetch(const Feed& feed, const float16* array_g, int first, const Strides& strides,
                                        int rows) {
    feed.template load_rows<true>(
        quads, [&](int row) { return row < rows; },
        [&](int pass) {
          const int key = Feed::kEvenPasses ? pass * Feed::kPassRows : feed.key_of_pass(pass);
          return reinterpret_cast<const char*>(mad_wide(first + key * static_cast<int>(strides.seq),
                                                        static_cast<int>(sizeof(float16)),
                                                        reinterpret_cast<int64>(array_g)));
        });
  }
};
