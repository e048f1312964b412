// The query tiles that a CTA of keys loops over, head after head of its group: the loop's position, and the tiles of Q
// and dout, fetched from global memory to registers while the present ones are in use, and from there to shared memory.
//
// With one buffer the next tile replaces the present one, after a barrier; with two, it takes the other half. kCopies
// (sm_80 or later, two buffers): cp.async brings tiles straight to shared memory; `arrive` waits for them. kParts > 1:
// some threads bring Q, and others dout, one part after the other (fetch_part).
#pragma once

#include "../backward_params.cuh"
#include "../block_lists.cuh"
#include "../key_loop.cuh"
#include "row_statistics.cuh"
#include "tile_loader.cuh"

// One tile of queries in shared memory. kCopies: with the statistics of its rows.
template <typename QTile, typename DoutTile, bool kCopies = false>
struct QueryTiles {
  alignas(128) unsigned char q[QTile::kBytes];
  alignas(128) unsigned char dout[DoutTile::kBytes];
};
template <typename QTile, typename DoutTile>
struct QueryTiles<QTile, DoutTile, true> {
  alignas(128) unsigned char q[QTile::kBytes];
  alignas(128) unsigned char dout[DoutTile::kBytes];
  alignas(128) unsigned char statistics[QTile::kRows * kStatisticsBytes];
};

template <typename QTileLoader, typename DoutTileLoader, int kBuffers, bool kCopies = false, int kParts = 1>
struct QueryLoader {
  static_assert(!kCopies || kBuffers == 2, "copies begin while the present tile is in use");
  using QTile = typename QTileLoader::Tile;
  using DoutTile = typename DoutTileLoader::Tile;
  using Tiles = QueryTiles<QTile, DoutTile, kCopies>;
  static constexpr int kStatisticsStep = kCopies ? kStatisticsBytes : 2;            // of a row
  static constexpr uint32 kStatisticsOffset = sizeof(QueryTiles<QTile, DoutTile>);  // in tiles that have them
  static constexpr int kTileQ = QTile::kRows;
  static constexpr int64 kItem = sizeof(DTYPE);

  const BackwardParams& params;
  const QueryLoop<kTileQ>& loop;
  QTileLoader q_loader;
  DoutTileLoader dout_loader;
  const char *next_q_g, *next_dout_g;
  int left, head, tile;  // tiles to go, and the present one
  uint32 scratch_row;    // the present tile's first row in scratch memory
  uint32 q_s, dout_s;    // where the present tile is; of two places the next one's is the sum less this
  uint32 q_sum, dout_sum;
  // Registers for Q, then for dout: two sets would not be free at once.
  static constexpr int kMostQuads =
      QTileLoader::kQuads > DoutTileLoader::kQuads ? QTileLoader::kQuads : DoutTileLoader::kQuads;
  uint4 quads[div_up(kMostQuads, kParts)];

  __device__ __forceinline__ QueryLoader(const BackwardParams& all, const QueryLoop<kTileQ>& seen,
                                         const KeyTileCoordinates& coords, const DTYPE* q_g, const DTYPE* dout_g,
                                         const Tiles (&tiles)[kBuffers])
      : params(all),
        loop(seen),
        q_loader(all.attention.q.seq),
        dout_loader(all.dout.seq),
        left(seen.tiles() * all.attention.group),
        head(coords.kv_head * all.attention.group),
        tile(seen.begin),
        scratch_row(::scratch_row(all, coords.scratch_batch, head, coords.scratch_begin + tile * kTileQ)),
        q_s(shared_address(tiles[0].q)),
        dout_s(shared_address(tiles[0].dout)),
        q_sum(q_s + shared_address(tiles[kBuffers - 1].q)),
        dout_sum(dout_s + shared_address(tiles[kBuffers - 1].dout)) {
    const Strides &q = all.attention.q, &dout = all.dout;
    next_q_g = QTileLoader::lowest(head_rows(q_g, q, coords.batch, head, 0), q.seq) + tile * (q.seq * kTileQ * kItem);
    next_dout_g = DoutTileLoader::lowest(head_rows(dout_g, dout, coords.batch, head, 0), dout.seq) +
                  tile * (dout.seq * kTileQ * kItem);
  }

  __device__ __forceinline__ bool more() const { return left > 1; }
  __device__ __forceinline__ int first_row() const { return tile * kTileQ; }
  __device__ __forceinline__ bool masked() const { return loop.masked(tile); }
  // For a block mask (block_query_loader.cuh), which does not exist here.
  __device__ __forceinline__ int whole() const { return 0; }
  __device__ __forceinline__ uint32 state(int) const { return kFull; }
  __device__ __forceinline__ void move_to_run() {}
  __device__ __forceinline__ bool in_run() const { return true; }
  __device__ __forceinline__ uint32 next_q_s() const { return kBuffers == 1 ? q_s : q_sum - q_s; }
  __device__ __forceinline__ uint32 next_dout_s() const { return kBuffers == 1 ? dout_s : dout_sum - dout_s; }

  // The first tile, all the way.
  __device__ __forceinline__ void begin(const float* statistics_g) {
    if (left == 0) return;
    const int rows = params.attention.sq - first_row();
    if constexpr (kCopies) {
      q_loader.template copy<true>(q_s, next_q_g, params.attention.q.seq, rows);
      dout_loader.template copy<true>(dout_s, next_dout_g, params.dout.seq, rows);
      copy_statistics(q_s, statistics_g, scratch_row);
      arrive();
      return;
    }
    q_loader.template load<true>(quads, next_q_g, params.attention.q.seq, rows);
    q_loader.store(q_s, quads);
    dout_loader.template load<true>(quads, next_dout_g, params.dout.seq, rows);
    dout_loader.store(dout_s, quads);
  }

  // Behind the last tile of a head follows the first one of the next head.
  __device__ __forceinline__ bool ends_head() const { return tile + 1 == loop.end; }
  __device__ __forceinline__ int next_tile() const { return ends_head() ? loop.begin : tile + 1; }
  __device__ __forceinline__ int next_rows() const { return params.attention.sq - next_tile() * kTileQ; }
  __device__ __forceinline__ int64 step_bytes(const Strides& strides) const {
    const int64 tile_bytes = strides.seq * kTileQ * kItem;
    return ends_head() ? strides.head * kItem - (loop.tiles() - 1) * tile_bytes : tile_bytes;
  }

  // After a tile, when both addresses are the next one's: Q, dout and statistics of the tile that many after the one
  // that is loaded next, if the head has another one after it: its last one may be ragged. (Before a tile, a head's
  // first too, sm_90's code of head dim 128 in one pass spills 280 bytes where here it spills 16: NVRTC 12.9.86,
  // 2026-11-26.)
  template <int kAhead>
  __device__ __forceinline__ void bring_to_l2(const float* statistics_g) const {
    if constexpr (kAhead > 0) {
      if (loop.end - tile <= kAhead + 3) return;
      const int64 q = params.attention.q.seq, dout = params.dout.seq;
      constexpr int64 kItems = (kAhead + 1) * kTileQ * kItem;
      ::bring_to_l2<QTileLoader, DoutTileLoader>(next_q_g + q * kItems, q, next_dout_g + dout * kItems, dout);
      const int line = not_hoisted(threadIdx.x);
      if (line >= kTileQ * kStatisticsBytes / kLineBytes) return;
      prefetch_l2(statistics_g + statistics_offset(scratch_row + (kAhead + 2) * kTileQ) + line * (kLineBytes / 4));
    }
  }

  __device__ __forceinline__ void fetch_q() {
    next_q_g += step_bytes(params.attention.q);
    if (more()) bring(q_loader, next_q_s(), next_q_g, params.attention.q, next_rows());
  }
  __device__ __forceinline__ void fetch_dout() {
    next_dout_g += step_bytes(params.dout);
    if (more()) bring(dout_loader, next_dout_s(), next_dout_g, params.dout, next_rows());
  }
  __device__ __forceinline__ void store_q() {
    if constexpr (kCopies) return;
    if (more()) q_loader.store(next_q_s(), quads);
    __syncwarp();  // no buffer: ptxas would otherwise let these stores wait for the next loads
  }
  __device__ __forceinline__ void store_dout() {
    if constexpr (kCopies) return;
    if (more()) dout_loader.store(next_dout_s(), quads);
  }

  // A part of the next tile's Q (kOfQ) or dout: from global memory to registers, and from there to shared memory. The
  // threads of the array call all parts, the first one first.
  template <bool kOfQ, int kPart>
  __device__ __forceinline__ void fetch_part() {
    if constexpr (kOfQ) {
      if (kPart == 0) next_q_g += step_bytes(params.attention.q);
      if (more()) fetch_part<kPart>(q_loader, next_q_g, params.attention.q, next_rows());
    } else {
      if (kPart == 0) next_dout_g += step_bytes(params.dout);
      if (more()) fetch_part<kPart>(dout_loader, next_dout_g, params.dout, next_rows());
    }
  }
  template <bool kOfQ, int kPart>
  __device__ __forceinline__ void store_part() {
    if (more()) put_part<kOfQ, kPart>();
  }
  // The first tile of an array, all the way.
  template <bool kOfQ, int kPart = 0>
  __device__ __forceinline__ void begin_parts() {
    if (left == 0) return;
    const int rows = params.attention.sq - first_row();
    if constexpr (kOfQ) {
      fetch_part<kPart>(q_loader, next_q_g, params.attention.q, rows);
    } else {
      fetch_part<kPart>(dout_loader, next_dout_g, params.dout, rows);
    }
    put_part<kOfQ, kPart>();
    if constexpr (kPart + 1 < kParts) begin_parts<kOfQ, kPart + 1>();
  }

  // The present tile's statistics: in global memory, or in shared memory.
  __device__ __forceinline__ auto statistics(const float* statistics_g) const {
    if constexpr (kCopies) {
      return q_s + kStatisticsOffset;
    } else {
      return statistics_g + statistics_offset(scratch_row);
    }
  }
  // Copies of those of the tile from a row of the scratch on, to the tile whose Q is at `to_s`.
  __device__ __forceinline__ static void copy_statistics(uint32 to_s, const float* statistics_g, uint32 from_row) {
    if constexpr (kCopies) {
      const int chunk = threadIdx.x;
      if (chunk >= kTileQ * kStatisticsBytes / kChunkBytes) return;
      cp_async_16(to_s + kStatisticsOffset + chunk * kChunkBytes,
                  statistics_g + statistics_offset(from_row) + chunk * (kChunkBytes / sizeof(float)));
    }
  }
  __device__ __forceinline__ void fetch_statistics(const float* statistics_g) {
    if (more()) copy_statistics(next_q_s(), statistics_g, scratch_row + next_scratch_rows());
  }
  __device__ __forceinline__ uint32 next_scratch_rows() const {
    return ends_head() ? params.rows_padded - (loop.tiles() - 1) * kTileQ : kTileQ;
  }

  // Wait for this thread's copies.
  __device__ __forceinline__ static void arrive() {
    if constexpr (kCopies) {
      cp_async_commit_group();
      cp_async_wait_group<0>();
    }
  }

  template <int kPart, typename Loader>
  __device__ __forceinline__ void fetch_part(const Loader& loader, const char* from_g, const Strides& strides,
                                             int rows) {
    loader.template load<true, kPart, kParts>(quads, from_g, strides.seq, rows);
  }
  template <bool kOfQ, int kPart>
  __device__ __forceinline__ void put_part() const {
    static_assert(kBuffers == 1, "the next tile takes the place of the present one");
    if constexpr (kOfQ) {
      q_loader.template store<kPart, kParts>(q_s, quads);
    } else {
      dout_loader.template store<kPart, kParts>(dout_s, quads);
    }
  }

  // The first `rows` rows from there to registers, or copies of them on their way to `to_s`.
  template <typename Loader>
  __device__ __forceinline__ void bring(const Loader& loader, uint32 to_s, const char* from_g, const Strides& strides,
                                        int rows) {
    if constexpr (kCopies) {
      loader.template copy<true>(to_s, from_g, strides.seq, rows);
    } else {
      loader.template load<true>(quads, from_g, strides.seq, rows);
    }
  }

  __device__ __forceinline__ void advance() {
    const int next = next_tile();
    q_s = next_q_s();
    dout_s = next_dout_s();
    scratch_row += next_scratch_rows();
    head += ends_head();
    tile = next;
    left--;
  }
};
