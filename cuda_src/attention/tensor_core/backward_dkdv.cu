// Attention backward on tensor cores, first of two kernels: dK and dV, and with ONE_PASS dQ as well.
//
//   P = exp(s - lse),  dS = P * (dout V^T - delta)
//   dV = P^T dout,  dK = softmax_scale * dS^T Q,  dQ = softmax_scale * dS K
//
// FlashAttention-2's backward (Dao, arXiv:2307.08691, algorithm 2) with keys along the m16 side: a warp keeps its keys
// and values as A fragments in registers and forms S^T = K Q^T and dP^T = V dout^T, so that P^T and dS^T, packed, are
// the A operands of dV += P^T dout and dK += dS^T Q. Only dS^T goes through shared memory, for dQ, which is the sum
// over all CTAs of a head and is gathered by float32 atomics (ONE_PASS) or by attention_backward_dq (deterministic).
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); head dims
//           in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS * M_TILES * 16 keys by TILE_Q queries, 8 * SUB_Q queries at a time; a warp owns its keys
//           alone and distributes the dQ tile over the warps by columns (DQ_ROW_WARPS: by rows too). With SCORE_VEC > 1
//           a warp's keys lie in another order in shared memory and registers, so that a thread's are neighbours
//           (score_tile.cuh).
// Grid      B * G * ceil(Sk / kKeys) CTAs; each loops over the query tiles of all query heads of its group, so that dK
//           and dV are complete without a second pass.
// Budget    registers: K and V (M_TILES * (D + Dv) / 4), dK and dV (M_TILES * (D + Dv) / 2). Shared memory: K, dS^T and
//           one tile of Q and dout each; without ONE_PASS two tiles each, and no K and no dS^T. NATIVE: two of all
//           but K.
// Barriers  two per query tile, one without ONE_PASS, and one where NATIVE.
// Edges     queries beyond Sq have L = +inf, hence P = dS = 0; keys beyond the sequence are zeros and masked, and get
//           zeros as gradients, as do keys of a sequence without queries.
#if !defined(M_TILES) || !defined(SUB_Q)
#error "M_TILES and SUB_Q come from a launch-configuration table, and what dkdv.cuh names"
#endif
#include "dkdv.cuh"

struct Traits : DkdvTraits<M_TILES, WARPS, SUB_Q, DQ_ROW_WARPS> {
  static constexpr int kGroups = chunk_groups(kSteps > kStepsV ? kSteps : kStepsV);
  static constexpr int kMiddleRow = (kTileQ / kSubRows - 1) / 2 * kSubRows;

  static_assert(kMTiles <= 2 && kTileQ / 8 <= 8 && (kTileQ / 8 & (kTileQ / 8 - 1)) == 0, "powers of two");
};

union Smem {
  struct {
#if ONE_PASS
    alignas(128) unsigned char k[Traits::KTile::kBytes];
    alignas(128) unsigned char ds[Traits::kDsBuffers][Traits::DsTile::kBytes];
#endif
    Traits::Loader::Tiles queries[Traits::kBuffers];
  } loop;
  alignas(128) unsigned char k[Traits::KTile::kBytes];  // K before the loop (with ONE_PASS it stays), dK after it
  alignas(128) unsigned char v[Traits::VTile::kBytes];  // V before the loop, dV after it
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 k[Traits::kMTiles][Traits::kSteps][2], v[Traits::kMTiles][Traits::kStepsV][2];   // A fragments
  float dk[Traits::kMTiles][Traits::kSteps][4], dv[Traits::kMTiles][Traits::kStepsV][4];  // dK / scale, dV boosted
  int first_key;                                                                          // of the sequence
};

// Values that are the same for all threads of the CTA.
struct Cta {
  uint32 ds_lane_s;  // see ds_lane_address
  FragmentAddress<Traits::QTile> q_fragment;
  FragmentAddress<Traits::DoutTile> dout_fragment;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  int batch;
  GradientScale scale;
};

// S^T += K Q^T and dP^T += V dout^T over the columns from this group on, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Tile::Fragment& s, Traits::Tile::Fragment& dp, const Warp& warp,
                                           const Cta& cta, uint32 q_rows_s, uint32 dout_rows_s) {
  using T = Traits;
#pragma unroll
  for (int n = 0; n < SUB_Q; n++) {
    add_product_nt<kGroup, DTYPE>(s[n], warp.k, q_rows_s + n * 8 * T::QTile::kRowBytes, cta.q_fragment);
    add_product_nt<kGroup, DTYPE>(dp[n], warp.v, dout_rows_s + n * 8 * T::DoutTile::kRowBytes, cta.dout_fragment);
  }
  if constexpr (kGroup + 1 < T::kGroups) add_scores<kGroup + 1>(s, dp, warp, cta, q_rows_s, dout_rows_s);
}

// dV += P^T dout and dK += dS^T Q for 8 queries, likewise.
template <int kGroup = 0>
__device__ __forceinline__ void add_gradients(Warp& warp, const Cta& cta, const uint32 (&p)[Traits::kMTiles][2],
                                              const uint32 (&ds)[Traits::kMTiles][2], uint32 q_rows_s,
                                              uint32 dout_rows_s) {
  add_product_nn<kGroup, DTYPE>(warp.dv, p, dout_rows_s, cta.dout_fragment);
  add_product_nn<kGroup, DTYPE>(warp.dk, ds, q_rows_s, cta.q_fragment);
  if constexpr (kGroup + 1 < Traits::kGroups) add_gradients<kGroup + 1>(warp, cta, p, ds, q_rows_s, dout_rows_s);
}

// kSubRows queries of the tile, from its row `row` on, against the warp's keys. kWhole: by a block mask all are
// seen.
template <bool kWhole, typename Loader, typename TileStatistics>
__device__ __forceinline__ void query_rows(Warp& warp, const Cta& cta, const Loader& loader, int row,
                                           TileStatistics tile_statistics) {
  using T = Traits;
  const uint32 state = kWhole ? kFull : loader.state(warp_index());
  const uint32 ds_lane_s = cta.ds_lane_s + ds_buffer<T>(loader);
  if (state == kEmpty) {
    constexpr uint32 kNothing[T::kMTiles][2] = {};
#pragma unroll
    for (int n = 0; n < SUB_Q; n++) {
      if (ONE_PASS) store_ds<T::DsTile>(ds_lane_s, row / 8 + n, kNothing);
    }
    return;
  }
  const uint32 q_rows_s = loader.q_s + row * T::QTile::kRowBytes;
  const uint32 dout_rows_s = loader.dout_s + row * T::DoutTile::kRowBytes;
  const QueryStatistics<SUB_Q> statistics(tile_statistics + row * Loader::kStatisticsStep);
  const ScoreCoordinates coords = {cta.batch, loader.head, loader.first_row() + row, warp.first_key};
  const TileOptions<T::Options, T::Dbias, T::Tile> tile(cta.params, cta.window, cta.arrays, coords, cta.scale,
                                                        cta.q_offset);

  T::Tile::Fragment s, dp;
  clear(s);
  clear(dp);
  add_scores(s, dp, warp, cta, q_rows_s, dout_rows_s);

  T::Tile::Packed p, ds;
  score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, !kWhole && loader.masked(), state != kFull);

#pragma unroll
  for (int n = 0; n < SUB_Q; n++) {
    if (ONE_PASS) store_ds<T::DsTile>(ds_lane_s, row / 8 + n, ds[n]);
  }
#pragma unroll
  for (int n = 0; n < SUB_Q; n += T::kTogether) {
    const uint32 q_s = q_rows_s + n * 8 * T::QTile::kRowBytes;
    const uint32 dout_s = dout_rows_s + n * 8 * T::DoutTile::kRowBytes;
    if constexpr (T::kTogether == 2) {
      add_sixteen_nn<DTYPE>(warp.dv, p[n], p[n + 1], dout_s, SixteenRows<T::DoutTile>::by_rows());
      add_sixteen_nn<DTYPE>(warp.dk, ds[n], ds[n + 1], q_s, SixteenRows<T::QTile>::by_rows());
    } else {
      add_gradients(warp, cta, p[n], ds[n], q_s, dout_s);
    }
  }
}

// One query tile, while the next one is on its way.
template <bool kWhole, typename Loader>
__device__ __forceinline__ void query_tile(Warp& warp, const Cta& cta, Loader& loader, const GradientArrays& arrays) {
  using T = Traits;
  const auto tile_statistics = loader.statistics(arrays.statistics_g);
  loader.fetch_q();
  if constexpr (T::kNative) {
    loader.fetch_dout();
    loader.fetch_statistics(arrays.statistics_g);
  }
#if NATIVE
#pragma unroll UNROLL
#else
#pragma unroll
#endif
  for (int row = 0; row < T::kTileQ; row += T::kSubRows) {
    query_rows<kWhole>(warp, cta, loader, row, tile_statistics);
    if (!ONE_PASS && !T::kNative && row == T::kMiddleRow) {
      loader.store_q();
      loader.fetch_dout();
    }
  }
}

// The keys of one CTA. `q_offset()` is the key position of query 0, `gradients()` where results go.
template <typename Loader = Traits::Loader, typename Offset, typename Gradients>
__device__ __forceinline__ void add_up_gradients(const BackwardParams& params, const GradientArrays& arrays,
                                                 const KeyTileCoordinates& coords, const KeyWindow& window,
                                                 Offset q_offset, Gradients gradients) {
  using T = Traits;
  Smem& smem = dynamic_shared<Smem>();
  const AttentionParams& attention = params.attention;

  // Phase 1: the queries that see the keys.
  const auto loop = loop_over_queries<T::kTileQ>(attention, window, coords, T::kKeys, arrays.options.modifiers.blocks);

  // Phase 2: V and K, through shared memory into registers.
  const int warp_row = warp_index() * T::kWarpKeys;
  Warp warp;
  warp.first_key = coords.first_key + warp_row;
  clear(warp.dk);
  clear(warp.dv);
  const ScaleArrays& scales = arrays.options.scales;
  const GradientScale scale = scales.of_head(params, coords.batch, coords.kv_head * attention.group);
  scales.set_aside(scale);
  if (loop.tiles() > 0) {
    load_keys<T, CtaBarrier>(
        smem, attention, window, coords, arrays.k_g, arrays.v_g,
        [&](uint32 v_s) {
          load_a_fragments<T::VTile>(warp.v, v_s, warp_row);
          scale_fragments(warp.v, scale.down);
        },
        [&](uint32 k_s) { load_a_fragments<T::KTile>(warp.k, k_s, warp_row); });
  }

  // Phase 3: the loop over the query tiles.
#if ONE_PASS
  const uint32 k_s = shared_address(smem.loop.k), ds_s = shared_address(smem.loop.ds);
  const uint32 ds_lane_s = ds_lane_address<T::DsTile>(ds_s, warp_row);
#else
  const uint32 k_s = 0, ds_s = 0, ds_lane_s = 0;
#endif
  const int64 offset = q_offset();
  const Cta cta = {ds_lane_s, {}, {}, params, window, arrays.options, offset, coords.batch, scale};
  Loader loader(params, loop, coords, arrays.q_g, arrays.dout_g, smem.loop.queries);
  loader.begin(arrays.statistics_g);
  __syncthreads();  // Q and dout: the first tile has been written
  loop_over_tiles(loader, arrays.statistics_g, loader.whole(), [&] {
    query_tile</*kWhole=*/false>(warp, cta, loader, arrays);
    finish_tile<T, CtaBarrier>(loader, arrays.dq_acc_g, ds_s, k_s);
  });
  if constexpr (Modifiers::kBlocks) {
    loop_over_tiles(loader, arrays.statistics_g, 0, [&] {
      query_tile</*kWhole=*/true>(warp, cta, loader, arrays);
      finish_tile<T, CtaBarrier>(loader, arrays.dq_acc_g, ds_s, k_s);
    });
  }

  // Phase 4: the gradients.
  store_gradients<T, CtaBarrier>(
      smem, params, coords, arrays.options.scales, gradients(),
      [&](uint32 v_s, float scale) { round_to_tile<T::VTile, DTYPE>(v_s, warp_row, warp.dv, scale); },
      [&](uint32 k_s, float scale) { round_to_tile<T::KTile, DTYPE>(k_s, warp_row, warp.dk, scale); });
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_backward_dkdv)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g,
                                   const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                   float* dq_acc_g, DTYPE* dk_g, DTYPE* dv_g, void* dbias_g PACKED_ARRAYS,
                                   const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                   const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                   const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  // Heads of rows that are not aligned are not interleaved: if they were, the loop of head dim 128 spilled, and
  // modelled 0.54 where it has 0.58 (NVRTC 12.9.86, 2026-11-22).
  const CtaKeys<Traits::kKeys, Traits::kTileQ, VEC != 1> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
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
