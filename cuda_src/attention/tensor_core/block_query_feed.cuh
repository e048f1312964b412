// The query tiles that a call's block mask leaves of a walk (query_feed.cuh), which follow in no regular steps.
#pragma once

#include "../block_query_walk.cuh"
#include "query_feed.cuh"

template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct BlockQueryFeed : QueryFeed<QTileFeed, DoutTileFeed, kBuffers> {
  using Base = QueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
  using Base::kTileQ, Base::head, Base::tile, Base::left, Base::params, Base::quads;
  using Walk = BlockQueryWalk<kTileQ>;

  const KeyPlace& place;
  const float16 *q_g, *dout_g;
  Walk blocks;
  typename Walk::Tile next, behind_next;  // this one is asked for while the present one is computed
  uint32 states;                          // of the present tile
  bool present_masked;

  __device__ __forceinline__ BlockQueryFeed(const BackwardParams& all, const Walk& walk, const KeyPlace& of,
                                            const float16* q, const float16* dout,
                                            const typename Base::Tiles (&tiles)[kBuffers])
      : Base(all, walk.seen, of, q, dout, tiles),
        place(of),
        q_g(q),
        dout_g(dout),
        blocks(walk),
        states(0),
        present_masked(false) {
    left = blocks.tiles();
    blocks.turn();
    stand_at(blocks.take());
    blocks.turn();
    next = blocks.take();
    this->next_q_g = rows<QTileFeed>(q_g, params.attention.q, head, tile);
    this->next_dout_g = rows<DoutTileFeed>(dout_g, params.dout, head, tile);
  }

  // The last ones are seen in full.
  __device__ __forceinline__ int whole() const { return blocks.whole; }
  __device__ __forceinline__ bool masked() const { return present_masked; }
  // What a part of the CTA's keys sees of the present tile.
  __device__ __forceinline__ uint32 state(int part) const { return BlockTile{tile, states, 0}.state(part); }

  // The walk comes to another run of tiles, between two of those loops that are for the tiles of a run.
  __device__ __forceinline__ void turn_to_run() { blocks.turn(); }
  __device__ __forceinline__ bool in_run() const { return blocks.in_run(); }

  // Tiles follow in no order that is known so far ahead.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const float*) const {}

  __device__ __forceinline__ void fetch_q() {
    behind_next = blocks.take();
    if (!this->more()) return;
    load_next(this->q_feed, rows<QTileFeed>(q_g, params.attention.q, next.head, next.tile), params.attention.q);
  }
  __device__ __forceinline__ void fetch_dout() {
    if (!this->more()) return;
    load_next(this->dout_feed, rows<DoutTileFeed>(dout_g, params.dout, next.head, next.tile), params.dout);
  }

  __device__ __forceinline__ void advance() {
    this->q_s = this->next_q_s();
    this->dout_s = this->next_dout_s();
    stand_at(next);
    next = behind_next;
    left--;
  }

 private:
  template <typename Feed>
  __device__ __forceinline__ const char* rows(const float16* array_g, const Strides& strides, int of_head,
                                              int of_tile) const {
    return Feed::lowest(head_rows(array_g, strides, place.batch, of_head, 0), strides.seq) +
           of_tile * (strides.seq * kTileQ * Base::kItem);
  }
  template <typename Feed>
  __device__ __forceinline__ void load_next(const Feed& feed, const char* from_g, const Strides& strides) {
    feed.template load<true>(quads, from_g, strides.seq, params.attention.sq - next.tile * kTileQ);
  }
  __device__ __forceinline__ void stand_at(const typename Walk::Tile& at) {
    head = at.head;
    tile = at.tile;
    states = at.states;
    present_masked = blocks.masked(tile);
    this->scratch_row = ::scratch_row(params, place.scratch_batch, head, place.scratch_begin + tile * kTileQ);
  }
};

template <bool kBlocks, typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct ChosenQueryFeed {
  using Type = QueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
};
template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct ChosenQueryFeed<true, QTileFeed, DoutTileFeed, kBuffers> {
  using Type = BlockQueryFeed<QTileFeed, DoutTileFeed, kBuffers>;
};
template <bool kBlocks, typename QTileFeed, typename DoutTileFeed, int kBuffers>
using QueryFeedOf = typename ChosenQueryFeed<kBlocks, QTileFeed, DoutTileFeed, kBuffers>::Type;
