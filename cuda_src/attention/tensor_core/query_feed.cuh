// The query tiles that a CTA of keys walks, head after head of its group: where the walk stands, and the tiles of Q and
// dout, fetched from global memory to registers while the present ones are in use, and from there to shared memory.
//
// With one buffer the next tile takes the place of the present one, behind a barrier; with two, the other half's.
#pragma once

#include "../backward_params.cuh"
#include "../block_lists.cuh"
#include "../key_walk.cuh"
#include "row_statistics.cuh"
#include "tile_feed.cuh"

// One tile of queries in shared memory.
template <typename QTile, typename DoutTile>
struct QueryTiles {
  alignas(128) unsigned char q[QTile::kBytes];
  alignas(128) unsigned char dout[DoutTile::kBytes];
};

template <typename QTileFeed, typename DoutTileFeed, int kBuffers>
struct QueryFeed {
  using QTile = typename QTileFeed::Tile;
  using DoutTile = typename DoutTileFeed::Tile;
  using Tiles = QueryTiles<QTile, DoutTile>;
  static constexpr int kTileQ = QTile::kRows;
  static constexpr int64 kItem = sizeof(float16);

  const BackwardParams& params;
  const QueryWalk<kTileQ>& walk;
  QTileFeed q_feed;
  DoutTileFeed dout_feed;
  const char *next_q_g, *next_dout_g;
  int left, head, tile;  // tiles to go, and the present one
  uint32 scratch_row;    // the present tile's first row in scratch memory
  uint32 q_s, dout_s;    // where the present tile is; of two places the next one's is the sum less this
  uint32 q_sum, dout_sum;
  // Of Q, then of dout: two sets of registers would not be free at once.
  uint4 quads[QTileFeed::kQuads > DoutTileFeed::kQuads ? QTileFeed::kQuads : DoutTileFeed::kQuads];

  __device__ __forceinline__ QueryFeed(const BackwardParams& all, const QueryWalk<kTileQ>& seen, const KeyPlace& place,
                                       const float16* q_g, const float16* dout_g, const Tiles (&tiles)[kBuffers])
      : params(all),
        walk(seen),
        q_feed(all.attention.q.seq),
        dout_feed(all.dout.seq),
        left(seen.tiles() * all.attention.group),
        head(place.kv_head * all.attention.group),
        tile(seen.begin),
        scratch_row(::scratch_row(all, place.scratch_batch, head, place.scratch_begin + tile * kTileQ)),
        q_s(shared_address(tiles[0].q)),
        dout_s(shared_address(tiles[0].dout)),
        q_sum(q_s + shared_address(tiles[kBuffers - 1].q)),
        dout_sum(dout_s + shared_address(tiles[kBuffers - 1].dout)) {
    const Strides &q = all.attention.q, &dout = all.dout;
    next_q_g = QTileFeed::lowest(head_rows(q_g, q, place.batch, head, 0), q.seq) + tile * (q.seq * kTileQ * kItem);
    next_dout_g = DoutTileFeed::lowest(head_rows(dout_g, dout, place.batch, head, 0), dout.seq) +
                  tile * (dout.seq * kTileQ * kItem);
  }

  __device__ __forceinline__ bool more() const { return left > 1; }
  __device__ __forceinline__ int first_row() const { return tile * kTileQ; }
  __device__ __forceinline__ bool masked() const { return walk.masked(tile); }
  // Of a block mask (block_query_feed.cuh), which there is none of.
  __device__ __forceinline__ int whole() const { return 0; }
  __device__ __forceinline__ uint32 state(int) const { return kFull; }
  __device__ __forceinline__ void turn_to_run() {}
  __device__ __forceinline__ bool in_run() const { return true; }
  __device__ __forceinline__ uint32 next_q_s() const { return kBuffers == 1 ? q_s : q_sum - q_s; }
  __device__ __forceinline__ uint32 next_dout_s() const { return kBuffers == 1 ? dout_s : dout_sum - dout_s; }

  // The first tile, all the way.
  __device__ __forceinline__ void begin() {
    if (left == 0) return;
    const int rows = params.attention.sq - first_row();
    q_feed.template load<true>(quads, next_q_g, params.attention.q.seq, rows);
    q_feed.store(q_s, quads);
    dout_feed.template load<true>(quads, next_dout_g, params.dout.seq, rows);
    dout_feed.store(dout_s, quads);
  }

  // Behind the last tile of a head follows the first one of the next head.
  __device__ __forceinline__ bool turns() const { return tile + 1 == walk.end; }
  __device__ __forceinline__ int next_tile() const { return turns() ? walk.begin : tile + 1; }
  __device__ __forceinline__ int next_rows() const { return params.attention.sq - next_tile() * kTileQ; }
  __device__ __forceinline__ int64 step_bytes(const Strides& strides) const {
    const int64 tile_bytes = strides.seq * kTileQ * kItem;
    return turns() ? strides.head * kItem - (walk.tiles() - 1) * tile_bytes : tile_bytes;
  }

  // Behind a tile, where both addresses are the next one's: Q, dout and statistics of the tile that many behind the one
  // that is loaded next, if the head has another behind it: its last one may be ragged. (Before a tile, a head's first
  // too, sm_90's code of head dim 128 in one pass spills 280 bytes where here it spills 16: NVRTC 12.9.86, 2026-11-26.)
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const float* statistics_g) const {
    if constexpr (kAhead > 0) {
      if (walk.end - tile <= kAhead + 3) return;
      const int64 q = params.attention.q.seq, dout = params.dout.seq;
      constexpr int64 kItems = (kAhead + 1) * kTileQ * kItem;
      ::bring_to_l2<QTileFeed, DoutTileFeed>(next_q_g + q * kItems, q, next_dout_g + dout * kItems, dout);
      const int line = not_hoisted(threadIdx.x);
      if (line >= kTileQ * kStatisticsBytes / kLineBytes) return;
      prefetch_l2(statistics_g + statistics_offset(scratch_row + (kAhead + 2) * kTileQ) + line * (kLineBytes / 4));
    }
  }

  __device__ __forceinline__ void fetch_q() {
    next_q_g += step_bytes(params.attention.q);
    if (more()) q_feed.template load<true>(quads, next_q_g, params.attention.q.seq, next_rows());
  }
  __device__ __forceinline__ void fetch_dout() {
    next_dout_g += step_bytes(params.dout);
    if (more()) dout_feed.template load<true>(quads, next_dout_g, params.dout.seq, next_rows());
  }
  __device__ __forceinline__ void store_q() {
    if (more()) q_feed.store(next_q_s(), quads);
    __syncwarp();  // no buffer: ptxas would otherwise let these stores wait for the next loads
  }
  __device__ __forceinline__ void store_dout() {
    if (more()) dout_feed.store(next_dout_s(), quads);
  }

  __device__ __forceinline__ void advance() {
    const int next = next_tile();
    q_s = next_q_s();
    dout_s = next_dout_s();
    scratch_row += turns() ? params.rows_padded - (walk.tiles() - 1) * kTileQ : kTileQ;
    head += turns();
    tile = next;
    left--;
  }
};
