// The query tiles that a call's block mask leaves of a loop (query_loader.cuh). Their distances are irregular.
#pragma once

#include "../block_query_loop.cuh"
#include "query_loader.cuh"

template <typename QTileLoader, typename DoutTileLoader, int kBuffers, bool kCopies, int kParts>
struct BlockQueryLoader : QueryLoader<QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts> {
  using Base = QueryLoader<QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts>;
  using Base::kTileQ, Base::head, Base::tile, Base::left, Base::params;
  using Loop = BlockQueryLoop<kTileQ>;

  const KeyTileCoordinates& coords;
  const DTYPE *q_g, *dout_g;
  Loop blocks;
  typename Loop::Tile next, after_next;  // this one is looked up while the present one is computed
  uint32 states;                         // of the present tile
  bool present_masked;

  __device__ __forceinline__ BlockQueryLoader(const BackwardParams& all, const Loop& loop, const KeyTileCoordinates& of,
                                              const DTYPE* q, const DTYPE* dout,
                                              const typename Base::Tiles (&tiles)[kBuffers])
      : Base(all, loop.seen, of, q, dout, tiles),
        coords(of),
        q_g(q),
        dout_g(dout),
        blocks(loop),
        states(0),
        present_masked(false) {
    left = blocks.tiles();
    blocks.next_run();
    stand_at(blocks.take());
    blocks.next_run();
    next = blocks.take();
    this->next_q_g = rows<QTileLoader>(q_g, params.attention.q, head, tile);
    this->next_dout_g = rows<DoutTileLoader>(dout_g, params.dout, head, tile);
  }

  // The last ones are seen in full.
  __device__ __forceinline__ int whole() const { return blocks.whole; }
  __device__ __forceinline__ bool masked() const { return present_masked; }
  // How much a part of the CTA's keys sees of the present tile.
  __device__ __forceinline__ uint32 state(int part) const { return BlockTile{tile, states, 0}.state(part); }

  // Move on to another run of tiles, between two of the inner loops over a run.
  __device__ __forceinline__ void move_to_run() { blocks.next_run(); }
  __device__ __forceinline__ bool in_run() const { return blocks.in_run(); }

  // Tiles follow in no order that is known so far ahead.
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const float*) const {}

  __device__ __forceinline__ void fetch_q() {
    after_next = blocks.take();
    if (!this->more()) return;
    load_next(this->q_loader, this->next_q_s(), rows<QTileLoader>(q_g, params.attention.q, next.head, next.tile),
              params.attention.q);
  }
  __device__ __forceinline__ void fetch_dout() {
    if (!this->more()) return;
    load_next(this->dout_loader, this->next_dout_s(), rows<DoutTileLoader>(dout_g, params.dout, next.head, next.tile),
              params.dout);
  }

  template <bool kOfQ, int kPart>
  __device__ __forceinline__ void fetch_part() {
    if (kPart == 0) after_next = blocks.take();
    if (!this->more()) return;
    const int rows = params.attention.sq - next.tile * kTileQ;
    const Strides& strides = kOfQ ? params.attention.q : params.dout;
    if constexpr (kOfQ) {
      Base::template fetch_part<kPart>(this->q_loader, this->rows<QTileLoader>(q_g, strides, next.head, next.tile),
                                       strides, rows);
    } else {
      Base::template fetch_part<kPart>(
          this->dout_loader, this->rows<DoutTileLoader>(dout_g, strides, next.head, next.tile), strides, rows);
    }
  }

  __device__ __forceinline__ void fetch_statistics(const float* statistics_g) {
    if (this->more()) Base::copy_statistics(this->next_q_s(), statistics_g, scratch_row_of(next));
  }

  __device__ __forceinline__ void advance() {
    this->q_s = this->next_q_s();
    this->dout_s = this->next_dout_s();
    stand_at(next);
    next = after_next;
    left--;
  }

 private:
  template <typename Loader>
  __device__ __forceinline__ const char* rows(const DTYPE* array_g, const Strides& strides, int of_head,
                                              int of_tile) const {
    return Loader::lowest(head_rows(array_g, strides, coords.batch, of_head, 0), strides.seq) +
           of_tile * (strides.seq * kTileQ * Base::kItem);
  }
  template <typename Loader>
  __device__ __forceinline__ void load_next(const Loader& loader, uint32 to_s, const char* from_g,
                                            const Strides& strides) {
    this->bring(loader, to_s, from_g, strides, params.attention.sq - next.tile * kTileQ);
  }
  __device__ __forceinline__ uint32 scratch_row_of(const typename Loop::Tile& at) const {
    return ::scratch_row(params, coords.scratch_batch, at.head, coords.scratch_begin + at.tile * kTileQ);
  }
  __device__ __forceinline__ void stand_at(const typename Loop::Tile& at) {
    head = at.head;
    tile = at.tile;
    states = at.states;
    present_masked = blocks.masked(tile);
    this->scratch_row = scratch_row_of(at);
  }
};

template <bool kBlocks, typename QTileLoader, typename DoutTileLoader, int kBuffers, bool kCopies, int kParts>
struct ChosenQueryLoader {
  using Type = QueryLoader<QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts>;
};
template <typename QTileLoader, typename DoutTileLoader, int kBuffers, bool kCopies, int kParts>
struct ChosenQueryLoader<true, QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts> {
  using Type = BlockQueryLoader<QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts>;
};
template <bool kBlocks, typename QTileLoader, typename DoutTileLoader, int kBuffers, bool kCopies, int kParts = 1>
using QueryLoaderOf = typename ChosenQueryLoader<kBlocks, QTileLoader, DoutTileLoader, kBuffers, kCopies, kParts>::Type;
