// Attention backward on tensor cores for head dims whose keys, values and gradients of 16 keys exceed one warp's
// registers: dK and dV, and with ONE_PASS dQ as well, as attention_backward_dkdv computes them (see there).
//
// Here two warps share 16 keys. One keeps K and dK and reads Q: S^T = K Q^T, dK += dS^T Q. The other keeps V and dV and
// reads dout: dP^T = V dout^T, P and dS from both, dV += P^T dout. S^T goes from the one to the other through shared
// memory, dS^T, which dQ needs there anyway, back. While one turns scores into gradients, the other has products to do.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); head dims
//           in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS / 2 * 16 keys by TILE_Q queries, 16 queries at a time. Warps 0 to WARPS / 2 - 1 have the
//           keys, the others the values: a pair sits on one sub-partition of the SM. The dQ tile is distributed over
//           all of them.
// Grid      B * G * ceil(Sk / kKeys) CTAs; each loops over the query tiles of all query heads of its group.
// Budget    registers: K and dK, or V and dV: 3 / 4 of the head dim. Shared memory: K (ONE_PASS), dS^T, S^T and the
//           tiles of Q and dout (two of each without ONE_PASS).
// Barriers  two per query tile, one without ONE_PASS, or where NATIVE; and two of each pair per 16 queries.
// Edges     as attention_backward_dkdv.
#include "dkdv.cuh"

struct Traits : DkdvTraits</*kMTiles=*/1, WARPS / 2, /*kSubTiles=*/2, DQ_ROW_WARPS> {
  static constexpr int kPairs = WARPS / 2;
  static_assert(WARPS % 2 == 0 && 2 * kPairs < 16, "two of the 16 barriers for each pair");
};

// S^T of a pair, 16 queries: one quad of each lane after the other, so that a warp's accesses are contiguous.
struct PairScores {
  float4 quads[Traits::kSubTiles][kWarpSize];
};

union Smem {
  struct {
#if ONE_PASS
    alignas(128) unsigned char k[Traits::KTile::kBytes];
#endif
    alignas(128) unsigned char ds[Traits::kDsBuffers][Traits::DsTile::kBytes];
    alignas(128) PairScores scores[Traits::kPairs];
    Traits::Loader::Tiles queries[Traits::kBuffers];
  } loop;
  alignas(128) unsigned char k[Traits::KTile::kBytes];  // K before the loop (with ONE_PASS it stays), dK after it
  alignas(128) unsigned char v[Traits::VTile::kBytes];  // V before the loop, dV after it
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

using Cta = CtaOfTwoKinds<Smem>;

// The two warps of a pair meet at separate barriers.
__device__ __forceinline__ int pair_index() { return warp_index() % Traits::kPairs; }
__device__ __forceinline__ int pair_row() { return pair_index() * Traits::kWarpKeys; }
__device__ __forceinline__ void scores_barrier() { bar_sync(1 + 2 * pair_index(), 2 * kWarpSize); }
__device__ __forceinline__ void gradients_barrier() { bar_sync(2 + 2 * pair_index(), 2 * kWarpSize); }

// A warp can hold no more of the next tile than Q or dout, and that only during its last products of this one. With
// ONE_PASS the dQ product hides dout's way.
template <typename Loader>
__device__ __forceinline__ void fetch_next(Loader& loader) {
  if constexpr (Traits::kNative) return;
#if ONE_PASS
  loader.fetch_q();
#else
  loader.store_q();
  loader.fetch_dout();
#endif
}

// A warp's registers in the loop, of rows of K or V: the rows as A fragments, their gradients, and where its
// lanes read Q or dout.
template <typename RowsTile, typename QueriesTile>
struct PairWarp {
  static constexpr int kSteps = RowsTile::kChunks;

  uint32 rows[1][kSteps][2];
  float gradients[1][kSteps][4];
  FragmentAddress<QueriesTile> fragment;

  __device__ __forceinline__ PairWarp() { clear(gradients); }
  __device__ __forceinline__ void take(uint32 rows_s) { load_a_fragments<RowsTile>(rows, rows_s, pair_row()); }
  __device__ __forceinline__ void give(uint32 rows_s, float scale) const {
    round_to_tile<RowsTile, DTYPE>(rows_s, pair_row(), gradients, scale);
  }

  // S^T += K Q^T, or dP^T += V dout^T, over the columns from this group on, group by group.
  template <int kGroup = 0>
  __device__ __forceinline__ void add_scores(Traits::Tile::Fragment& s, uint32 queries_s) const {
#pragma unroll
    for (int n = 0; n < Traits::kSubTiles; n++) {
      add_product_nt<kGroup, DTYPE>(s[n], rows, queries_s + n * 8 * QueriesTile::kRowBytes, fragment);
    }
    if constexpr (kGroup + 1 < chunk_groups(kSteps)) add_scores<kGroup + 1>(s, queries_s);
  }
  // dK += dS^T Q, or dV += P^T dout, for 8 queries, likewise.
  template <int kGroup = 0>
  __device__ __forceinline__ void add_gradients(const uint32 (&weights)[1][2], uint32 queries_s) {
    add_product_nn<kGroup, DTYPE>(gradients, weights, queries_s, fragment);
    if constexpr (kGroup + 1 < chunk_groups(kSteps)) add_gradients<kGroup + 1>(weights, queries_s);
  }
  // For 16 queries, in one instruction.
  __device__ __forceinline__ void add_gradients(const Traits::Tile::Packed& weights, uint32 queries_s) {
    add_sixteen_nn<DTYPE>(gradients, weights[0], weights[1], queries_s, SixteenRows<QueriesTile>::by_rows());
  }
};

// The first of each pair: K and dK / scale.
struct KeyWarp : PairWarp<Traits::KTile, Traits::QTile> {
  static constexpr bool kOfKeys = true;

  __device__ __forceinline__ void scores(PairScores& pair, uint32 q_rows_s) const {
    Traits::Tile::Fragment s;
    clear(s);
    add_scores(s, q_rows_s);
#pragma unroll
    for (int n = 0; n < Traits::kSubTiles; n++) {
      pair.quads[n][lane_index()] = make_float4(s[n][0][0], s[n][0][1], s[n][0][2], s[n][0][3]);
    }
  }

  // dS^T of 16 keys by 16 queries, two chunks, as A fragments.
  __device__ __forceinline__ void add_dk(uint32 ds_s, int row, uint32 q_rows_s) {
    const int lane_row = pair_row() + lane_index() % 16;
    uint32 r[4];
    ldmatrix<4>(r, ds_s + Traits::DsTile::offset(lane_row, row / 8 + lane_index() / 16));
    if constexpr (Traits::kTogether == 2) {
      add_gradients({{{r[0], r[1]}}, {{r[2], r[3]}}}, q_rows_s);
      return;
    }
    add_gradients({{r[0], r[1]}}, q_rows_s);
    add_gradients({{r[2], r[3]}}, q_rows_s + 8 * Traits::QTile::kRowBytes);
  }

  template <typename Loader>
  __device__ __forceinline__ void query_tile(const Cta& cta, Loader& loader) {
    PairScores& pair = cta.smem.loop.scores[pair_index()];
    scores(pair, loader.q_s);
    scores_barrier();  // pair's S: written
#if NATIVE
#pragma unroll UNROLL
#else
#pragma unroll
#endif
    for (int row = 0; row < Traits::kTileQ; row += Traits::kSubRows) {
      const uint32 q_rows_s = loader.q_s + row * Traits::QTile::kRowBytes;
      gradients_barrier();  // pair's dS: written; S: read
      if (row + Traits::kSubRows < Traits::kTileQ) {
        scores(pair, q_rows_s + Traits::kSubRows * Traits::QTile::kRowBytes);
        scores_barrier();  // pair's next S: written
      } else {
        fetch_next(loader);
      }
      add_dk(shared_address(cta.smem.loop.ds) + ds_buffer<Traits>(loader), row, q_rows_s);
    }
  }
};

// The second: V and dV, boosted.
struct ValueWarp : PairWarp<Traits::VTile, Traits::DoutTile> {
  static constexpr bool kOfKeys = false;

  template <typename Loader>
  __device__ __forceinline__ void query_tile(const Cta& cta, Loader& loader) {
    using T = Traits;
    const PairScores& pair = cta.smem.loop.scores[pair_index()];
    const uint32 ds_lane_s =
        ds_lane_address<T::DsTile>(shared_address(cta.smem.loop.ds), pair_row()) + ds_buffer<T>(loader);
    const auto tile_statistics = loader.statistics(cta.statistics_g);
#if NATIVE
#pragma unroll UNROLL
#else
#pragma unroll
#endif
    for (int row = 0; row < T::kTileQ; row += T::kSubRows) {
      const uint32 dout_rows_s = loader.dout_s + row * T::DoutTile::kRowBytes;
      const QueryStatistics<T::kSubTiles> statistics(tile_statistics + row * Loader::kStatisticsStep);
      const ScoreCoordinates at = {cta.coords.batch, loader.head, loader.first_row() + row,
                                   cta.coords.first_key + pair_row()};
      const TileOptions<T::Options, T::Dbias, T::Tile> tile(cta.params, cta.window, cta.arrays, at, cta.scale,
                                                            cta.q_offset);
      T::Tile::Fragment s, dp;
      clear(dp);
      add_scores(dp, dout_rows_s);

      scores_barrier();  // pair's S: written
#pragma unroll
      for (int n = 0; n < T::kSubTiles; n++) {
        const float4 quad = pair.quads[n][lane_index()];
        s[n][0][0] = quad.x;
        s[n][0][1] = quad.y;
        s[n][0][2] = quad.z;
        s[n][0][3] = quad.w;
      }
      T::Tile::Packed p, ds;
      score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, loader.masked(), loader.state(pair_index()) != kFull);
#pragma unroll
      for (int n = 0; n < T::kSubTiles; n++) {
        store_ds<T::DsTile>(ds_lane_s, row / 8 + n, ds[n]);
      }
      gradients_barrier();  // pair's dS: written; S: read
      if (row + T::kSubRows == T::kTileQ) fetch_next(loader);
      if constexpr (T::kTogether == 2) {
        add_gradients(p, dout_rows_s);
      } else {
#pragma unroll
        for (int n = 0; n < T::kSubTiles; n++) add_gradients(p[n], dout_rows_s + n * 8 * T::DoutTile::kRowBytes);
      }
    }
  }
};

// Phase 3, by tiles of queries (add_up_by_kinds).
template <typename Warp, typename Loader>
__device__ __forceinline__ void begin_tiles(Warp&, const Cta& cta, Loader& loader) {
  loader.begin(cta.statistics_g);
}
template <typename Warp, typename Loader>
__device__ __forceinline__ void query_tile(Warp& warp, const Cta& cta, Loader& loader) {
  if (!ONE_PASS || Traits::kNative) loader.fetch_q();
  if constexpr (Traits::kNative) {
    loader.fetch_dout();
    loader.fetch_statistics(cta.statistics_g);
  }
  warp.query_tile(cta, loader);
  finish_tile<Traits, CountedBarrier>(loader, cta.dq_acc_g, shared_address(cta.smem.loop.ds),
                                      shared_address(cta.smem.k));
}
template <typename Warp>
__device__ __forceinline__ void end_tiles(Warp&, const Cta&) {}

// The keys of one CTA.
template <typename... Inputs>
__device__ __forceinline__ void add_up_gradients(const Inputs&... inputs) {
  add_up_by_kinds<Traits, KeyWarp, ValueWarp>(dynamic_shared<Smem>(), inputs...);
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_backward_dkdv_paired)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g,
                                          const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                          float* dq_acc_g, DTYPE* dk_g, DTYPE* dv_g, void* dbias_g PACKED_ARRAYS,
                                          const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                          const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                          const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaKeys<Traits::kKeys, Traits::kTileQ> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  add_up_own_gradients(own, params,
                       {q_g,
                        k_g,
                        v_g,
                        dout_g,
                        statistics_g,
                        dq_acc_g,
                        {bias_g, mask_g, slopes_g, dbias_g, modifiers, {scales_g, cta_scales_g}}},
                       dk_g, dv_g);
}
