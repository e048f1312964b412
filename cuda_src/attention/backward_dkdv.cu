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
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS * M_TILES * 16 keys by TILE_Q queries, 8 * SUB_Q queries at a time; a warp owns its keys
//           alone and shares out the dQ tile by columns (DQ_ROW_WARPS: by rows too). With SCORE_VEC > 1 a warp's keys
//           lie in another order in shared memory and registers, so that a thread's are neighbours (score_grid.cuh).
// Grid      B * G * ceil(Sk / kKeys) CTAs; each walks the query tiles of all query heads of its group, so that dK and
//           dV are complete without a second pass.
// Budget    registers: K and V (M_TILES * (D + Dv) / 4), dK and dV (M_TILES * (D + Dv) / 2). Shared memory: K, dS^T and
//           one tile of Q and dout each; without ONE_PASS two tiles each, and no K and no dS^T.
// Barriers  two per query tile, one without ONE_PASS.
// Edges     queries beyond Sq have L = +inf, hence P = dS = 0; keys beyond the sequence are zeros and masked, and get
//           zeros as gradients.
#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || !defined(TILE_Q) || \
    !defined(SUB_Q) || !defined(DQ_ROW_WARPS) || !defined(ONE_PASS) || !defined(VEC) || !defined(MIN_CTAS) || \
    !defined(SHARED_BYTES)
#error \
    "HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_Q, SUB_Q, DQ_ROW_WARPS, ONE_PASS, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(DBIAS) || !defined(DBIAS_ADD) || !defined(DBIAS_ACCUMULATE)
#error \
    "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT, DBIAS, DBIAS_ADD, DBIAS_ACCUMULATE come from a launch-configuration table"
#endif
#include "dq_product.cuh"
#include "query_feed.cuh"
#include "resident_rows.cuh"
#include "row_statistics.cuh"
#include "score_gradient.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileQ = TILE_Q;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpKeys = kMTiles * 16;
  static constexpr int kKeys = WARPS * kWarpKeys;
  static constexpr int kSteps = div_up(kHeadDim, 8);    // k8 steps of S, n8 tiles of dK
  static constexpr int kStepsV = div_up(kHeadDimV, 8);  // k8 steps of dP, n8 tiles of dV
  static constexpr int kGroups = chunk_groups(kSteps > kStepsV ? kSteps : kStepsV);
  static constexpr int kSubRows = SUB_Q * 8;
  static constexpr int kBuffers = ONE_PASS ? 1 : 2;  // of Q and dout: the dQ product leaves time to refill one
  static constexpr int kMiddleRow = (kTileQ / kSubRows - 1) / 2 * kSubRows;

  using KTile = SwizzledTile<kKeys, kSteps>;
  using VTile = SwizzledTile<kKeys, kStepsV>;
  using QTile = SwizzledTile<kTileQ, kSteps>;
  using DoutTile = SwizzledTile<kTileQ, kStepsV>;
  using DsTile = SwizzledTile<kKeys, kTileQ / 8>;  // dS^T
  using QStage = TileStage<QTile, kHeadDim, kVec, kThreads>;
  using DoutStage = TileStage<DoutTile, kHeadDimV, kVec, kThreads>;
  static constexpr int kRun = SCORE_VEC < 2 * kMTiles ? SCORE_VEC : 2 * kMTiles;
  using Grid = ScoreGrid<kMTiles, SUB_Q, Along::kM16, kRun>;
  using Options = GradientOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, DBIAS, DBIAS_ADD, DBIAS_ACCUMULATE>;
  using Walk = QueryWalk<kTileQ>;
  using Feed = QueryFeed<QStage, DoutStage, kBuffers>;
  using DqWarp = DqShare<DsTile, KTile, kTileQ, WARPS, DQ_ROW_WARPS>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileQ % kSubRows == 0 && kRowPad % kTileQ == 0, "whole tiles in the padded rows");
  static_assert(kMTiles <= 2 && kTileQ / 8 <= 8 && (kTileQ / 8 & (kTileQ / 8 - 1)) == 0, "powers of two");
};

union Smem {
  struct {
#if ONE_PASS
    alignas(128) unsigned char k[Traits::KTile::kBytes];
    alignas(128) unsigned char ds[Traits::DsTile::kBytes];
#endif
    Traits::Feed::Tiles queries[Traits::kBuffers];
  } loop;
  alignas(128) unsigned char k[Traits::KTile::kBytes];  // K before the walk (with ONE_PASS it stays), dK after it
  alignas(128) unsigned char v[Traits::VTile::kBytes];  // V before the walk, dV after it
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// What a warp keeps in registers through the walk.
struct Warp {
  uint32 k[Traits::kMTiles][Traits::kSteps][2], v[Traits::kMTiles][Traits::kStepsV][2];   // A fragments
  float dk[Traits::kMTiles][Traits::kSteps][4], dv[Traits::kMTiles][Traits::kStepsV][4];  // dK / scale, dV boosted
  int first_key;                                                                          // of the sequence
};

// What every thread of the CTA knows of the walk.
struct Cta {
  uint32 ds_lane_s;  // see ds_lane_address
  FragmentAddress<Traits::QTile> q_fragment;
  FragmentAddress<Traits::DoutTile> dout_fragment;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  int batch;
};

// S^T += K Q^T and dP^T += V dout^T over the columns of a group and those behind it, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Grid::Fragment& s, Traits::Grid::Fragment& dp, const Warp& warp,
                                           const Cta& cta, uint32 q_rows_s, uint32 dout_rows_s) {
  using T = Traits;
#pragma unroll
  for (int n = 0; n < SUB_Q; n++) {
    add_product_nt<kGroup>(s[n], warp.k, q_rows_s + n * 8 * T::QTile::kRowBytes, cta.q_fragment);
    add_product_nt<kGroup>(dp[n], warp.v, dout_rows_s + n * 8 * T::DoutTile::kRowBytes, cta.dout_fragment);
  }
  if constexpr (kGroup + 1 < T::kGroups) add_scores<kGroup + 1>(s, dp, warp, cta, q_rows_s, dout_rows_s);
}

// dV += P^T dout and dK += dS^T Q for 8 queries, likewise.
template <int kGroup = 0>
__device__ __forceinline__ void add_gradients(Warp& warp, const Cta& cta, const uint32 (&p)[Traits::kMTiles][2],
                                              const uint32 (&ds)[Traits::kMTiles][2], uint32 q_rows_s,
                                              uint32 dout_rows_s) {
  add_product_nn<kGroup>(warp.dv, p, dout_rows_s, cta.dout_fragment);
  add_product_nn<kGroup>(warp.dk, ds, q_rows_s, cta.q_fragment);
  if constexpr (kGroup + 1 < Traits::kGroups) add_gradients<kGroup + 1>(warp, cta, p, ds, q_rows_s, dout_rows_s);
}

// kSubRows queries of the tile, from its row `row` on, against the warp's keys.
__device__ __forceinline__ void query_rows(Warp& warp, const Cta& cta, const Traits::Feed& feed, int row,
                                           const float* statistics_g) {
  using T = Traits;
  const uint32 q_rows_s = feed.q_s + row * T::QTile::kRowBytes;
  const uint32 dout_rows_s = feed.dout_s + row * T::DoutTile::kRowBytes;
  const QueryStatistics<SUB_Q> statistics(statistics_g + row * 2);
  const ScorePlace place = {cta.batch, feed.head, feed.first_row() + row, warp.first_key};
  const ScoreTile<T::Options, T::Grid> tile(cta.params, cta.window, cta.arrays, place, cta.q_offset);

  T::Grid::Fragment s, dp;
  clear(s);
  clear(dp);
  add_scores(s, dp, warp, cta, q_rows_s, dout_rows_s);

  T::Grid::Packed p, ds;
  score_gradients<T::Grid>(p, ds, s, dp, statistics, tile, feed.masked());

#pragma unroll
  for (int n = 0; n < SUB_Q; n++) {
    if (ONE_PASS) store_ds<T::DsTile>(cta.ds_lane_s, row / 8 + n, ds[n]);
  }
#pragma unroll
  for (int n = 0; n < SUB_Q; n++) {
    add_gradients(warp, cta, p[n], ds[n], q_rows_s + n * 8 * T::QTile::kRowBytes,
                  dout_rows_s + n * 8 * T::DoutTile::kRowBytes);
  }
}

// dV and dK, one after the other through shared memory: fragments hold 4 bytes of a row each.
__device__ __forceinline__ void store_gradients(const Warp& warp, Smem& smem, const BackwardParams& params,
                                                const KeyPlace& place, float16* dk_g, float16* dv_g) {
  using T = Traits;
  const int rows = params.attention.sk - place.first_key, warp_row = warp_index() * T::kWarpKeys;
  const float keep_scale = DROPOUT ? params.attention.scores.keep_scale : 1.f;
  round_to_tile<T::VTile>(shared_address(smem.v), warp_row, warp.dv, kUnboost * keep_scale);
  __syncthreads();  // v: dV is complete
  store_rows<T::VTile, T::kHeadDimV, T::kVec, T::kThreads, T::Grid>(
      head_rows(dv_g, params.dv, place.batch, place.kv_head, place.first_key), params.dv.seq, smem.v, rows,
      params.accumulate);
  __syncthreads();  // v: read; dK takes its place
  round_to_tile<T::KTile>(shared_address(smem.k), warp_row, warp.dk, params.scale);
  __syncthreads();  // k: dK is complete
  store_rows<T::KTile, T::kHeadDim, T::kVec, T::kThreads, T::Grid>(
      head_rows(dk_g, params.dk, place.batch, place.kv_head, place.first_key), params.dk.seq, smem.k, rows,
      params.accumulate);
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dkdv(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                            const float* statistics_g, float* dq_acc_g, float16* dk_g, float16* dv_g, void* dbias_g,
                            const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                            const void* slopes_g, const BackwardParams params) {
  using T = Traits;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
  const AttentionParams& attention = params.attention;

  // Phase 1: the keys, and the queries that see them.
  const KeyPlace place(attention, T::kKeys);
  const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, place.batch);
  const T::Walk walk(window, place.first_key, T::kKeys, attention.sq);
  const OptionArrays arrays = {bias_g, mask_g, slopes_g, dbias_g};

  // Phase 2: V and K, through shared memory into registers.
  Warp warp;
  warp.first_key = place.first_key + warp_index() * T::kWarpKeys;
  clear(warp.dk);
  clear(warp.dv);
  if (walk.tiles() > 0) {
    const int rows = window.keys - place.first_key, warp_row = warp_index() * T::kWarpKeys;
    load_rows<T::VTile, T::kHeadDimV, T::kVec, T::kThreads, T::Grid>(
        shared_address(smem.v), head_rows(v_g, attention.v, place.batch, place.kv_head, place.first_key),
        attention.v.seq, rows);
    __syncthreads();  // v: written
    load_a_fragments<T::VTile>(warp.v, shared_address(smem.v), warp_row);
    __syncthreads();  // v: read; K takes its place
    load_rows<T::KTile, T::kHeadDim, T::kVec, T::kThreads, T::Grid>(
        shared_address(smem.k), head_rows(k_g, attention.k, place.batch, place.kv_head, place.first_key),
        attention.k.seq, rows);
    __syncthreads();  // k: written
    load_a_fragments<T::KTile>(warp.k, shared_address(smem.k), warp_row);
    if (!ONE_PASS) __syncthreads();  // k: read; Q and dout take its place
  }

  // Phase 3: the walk over the query tiles.
#if ONE_PASS
  const uint32 k_s = shared_address(smem.loop.k), ds_s = shared_address(smem.loop.ds);
  const uint32 ds_lane_s = ds_lane_address<T::DsTile>(ds_s, warp_index() * T::kWarpKeys);
#else
  const uint32 ds_lane_s = 0;
#endif
  const int64 q_offset = query_offset(attention, q_offsets_g, place.batch);
  const Cta cta = {ds_lane_s, {}, {}, params, window, arrays, q_offset, place.batch};
  T::Feed feed(params, walk, place, q_g, dout_g, smem.loop.queries);
  feed.begin();
  __syncthreads();  // Q and dout: the first tile has been written
#pragma unroll 1
  for (; feed.left > 0; feed.advance()) {
    const float* tile_statistics_g = statistics_g + statistics_offset(feed.scratch_row);
    feed.fetch_q();
#pragma unroll
    for (int row = 0; row < T::kTileQ; row += T::kSubRows) {
      query_rows(warp, cta, feed, row, tile_statistics_g);
      if (!ONE_PASS && row == T::kMiddleRow) {
        feed.store_q();
        feed.fetch_dout();
      }
    }
#if ONE_PASS
    __syncthreads();  // Q, dout: read; ds: written
    feed.store_q();
    feed.fetch_dout();
    float* tile_dq_g = dq_acc_g + accumulator_offset<T::kSteps>(feed.scratch_row);
    T::DqWarp().add(tile_dq_g, ds_s, k_s);
#endif
    feed.store_dout();
    __syncthreads();  // Q, dout: the next tile has been written; ds: read
  }

  // Phase 4: the gradients.
  store_gradients(warp, smem, params, place, dk_g, dv_g);
}
