// The query tiles that a call's block mask leaves of a walk (query_feed.cuh), which follow in no regular steps.
#pragma once

#include "../block_query_walk.cuh"
#include "packed_query_feed.cuh"

template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct BlockQueryFeed : QueryFeed<QTileFeed, DoutTileFeed, kBuffers> {
  using Base = QueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
  using Base::kTileQ, Base::head, Base::tile, Base::left, Base::params, Base::quads;
  using Walk = BlockQueryWalk<kTileQ>;

  const KeyPlace& place;
  const float16 *q_g, *dout_g;
  Walk blocks;
  typename Walk::Tile next;
  bool present_masked;

  __device__ __forceinline__ BlockQueryFeed(const BackwardParams& all, const Walk& walk, const KeyPlace& of,
                                            const float16* q, const float16* dout,
                                            const typename Base::Tiles (&tiles)[kBuffers])
      : Base(all, walk.whole, of, q, dout, tiles),
        place(of),
        q_g(q),
        dout_g(dout),
        blocks(walk),
        present_masked(false) {
    left = blocks.tiles();
    next = blocks.from(blocks.first_head);
    if (left > 0) turn();
    this->next_q_g = rows<QTileFeed>(q_g, params.attention.q, {head, tile});
    this->next_dout_g = rows<DoutTileFeed>(dout_g, params.dout, {head, tile});
  }

  __device__ __forceinline__ bool masked() const { return present_masked; }

  __device__ __forceinline__ void fetch_q() {
    if (!this->more()) return;
    load_next(this->q_feed, rows<QTileFeed>(q_g, params.attention.q, next), params.attention.q);
  }
  __device__ __forceinline__ void fetch_dout() {
    if (!this->more()) return;
    load_next(this->dout_feed, rows<DoutTileFeed>(dout_g, params.dout, next), params.dout);
  }

  __device__ __forceinline__ void advance() {
    this->q_s = this->next_q_s();
    this->dout_s = this->next_dout_s();
    if (this->more()) turn();
    left--;
  }

 private:
  template <typename Feed>
  __device__ __forceinline__ const char* rows(const float16* array_g, const Strides& strides,
                                              typename Walk::Tile at) const {
    return Feed::lowest(head_rows(array_g, strides, place.batch, at.head, place.query_begin), strides.seq) +
           at.tile * (strides.seq * kTileQ * Base::kItem);
  }
  template <typename Feed>
  __device__ __forceinline__ void load_next(const Feed& feed, const char* from_g, const Strides& strides) {
    feed.template load<true>(quads, from_g, strides.seq, params.attention.sq - next.tile * kTileQ);
  }
  // On to the next tile.
  __device__ __forceinline__ void turn() {
    head = next.head;
    tile = next.tile;
    present_masked = blocks.masked(next);
    this->scratch_row = ::scratch_row(params, place.scratch_batch, head, place.scratch_begin + tile * kTileQ);
    next = blocks.after(next);
  }
};

// Of a call, and of one with packed sequences.
template <bool kBlocks, typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct QueryFeedOf {
  using Type = QueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
  using Packed = PackedQueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
};
template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct QueryFeedOf<true, QTileFeed, DoutTileFeed, kBuffers> {
  using Type = BlockQueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
  using Packed = Type;
};
