// Attention backward on tensor cores for head dims whose keys, values and gradients of 16 keys exceed one warp's
// registers: dK and dV, and with ONE_PASS dQ as well, as attention_backward_dkdv computes them (see there).
//
// Here two warps share 16 keys. One keeps K and dK and reads Q: S^T = K Q^T, dK += dS^T Q. The other keeps V and dV and
// reads dout: dP^T = V dout^T, P and dS from both, dV += P^T dout. S^T goes from the one to the other through shared
// memory, dS^T, which dQ needs there anyway, back. While one turns scores into gradients, the other has products to do.
//
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS / 2 * 16 keys by TILE_Q queries, 16 queries at a time. Warps 0 to WARPS / 2 - 1 have the
//           keys, the others the values: a pair sits on one sub-partition of the SM. All share out the dQ tile.
// Grid      B * G * ceil(Sk / kKeys) CTAs; each walks the query tiles of all query heads of its group.
// Budget    registers: K and dK, or V and dV: 3 / 4 of the head dim. Shared memory: K (ONE_PASS), dS^T, S^T and the
//           tiles of Q and dout (two of each without ONE_PASS).
// Barriers  two per query tile, one without ONE_PASS; and two of each pair per 16 queries.
// Edges     as attention_backward_dkdv.
#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) || !defined(TILE_Q) || !defined(ONE_PASS) || \
    !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "HEAD_DIM, HEAD_DIM_V, WARPS, TILE_Q, ONE_PASS, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(DBIAS) || !defined(DBIAS_ADD) || !defined(DBIAS_ACCUMULATE)
#error \
    "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT, DBIAS, DBIAS_ADD, DBIAS_ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/barrier.cuh"
#include "dq_product.cuh"
#include "query_feed.cuh"
#include "resident_rows.cuh"
#include "row_statistics.cuh"
#include "score_gradient.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kTileQ = TILE_Q;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kPairs = WARPS / 2;
  static constexpr int kPairKeys = 16;
  static constexpr int kKeys = kPairs * kPairKeys;
  static constexpr int kSteps = div_up(kHeadDim, 8);    // k8 steps of S, n8 tiles of dK
  static constexpr int kStepsV = div_up(kHeadDimV, 8);  // k8 steps of dP, n8 tiles of dV
  static constexpr int kSubTiles = 2;                   // n8 tiles of queries at a time
  static constexpr int kSubRows = kSubTiles * 8;
  static constexpr int kBuffers = ONE_PASS ? 1 : 2;  // of Q and dout: the dQ product leaves time to refill one

  using KTile = SwizzledTile<kKeys, kSteps>;
  using VTile = SwizzledTile<kKeys, kStepsV>;
  using QTile = SwizzledTile<kTileQ, kSteps>;
  using DoutTile = SwizzledTile<kTileQ, kStepsV>;
  using DsTile = SwizzledTile<kKeys, kTileQ / 8>;  // dS^T
  using QStage = TileStage<QTile, kHeadDim, kVec, kThreads>;
  using DoutStage = TileStage<DoutTile, kHeadDimV, kVec, kThreads>;
  static constexpr int kRun = SCORE_VEC < 2 ? SCORE_VEC : 2;
  using Grid = ScoreGrid<1, kSubTiles, Along::kM16, kRun>;
  using Options = GradientOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, DBIAS, DBIAS_ADD, DBIAS_ACCUMULATE>;
  using Walk = QueryWalk<kTileQ>;
  using Feed = QueryFeed<QStage, DoutStage, kBuffers>;
  using DqWarp = DqShare<DsTile, KTile, kTileQ, WARPS, 1>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileQ % kSubRows == 0 && kRowPad % kTileQ == 0, "whole tiles in the padded rows");
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
    alignas(128) unsigned char ds[Traits::DsTile::kBytes];
    alignas(128) PairScores scores[Traits::kPairs];
    Traits::Feed::Tiles queries[Traits::kBuffers];
  } loop;
  alignas(128) unsigned char k[Traits::KTile::kBytes];  // K before the walk (with ONE_PASS it stays), dK after it
  alignas(128) unsigned char v[Traits::VTile::kBytes];  // V before the walk, dV after it
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// The two warps of a pair meet at barriers of their own. The CTA's is counted too: the two kinds of warps reach it from
// different places in the code, which __syncthreads forbids.
__device__ __forceinline__ void cta_barrier() { bar_sync(0, Traits::kThreads); }
__device__ __forceinline__ int pair_index() { return warp_index() % Traits::kPairs; }
__device__ __forceinline__ void scores_barrier() { bar_sync(1 + 2 * pair_index(), 2 * kWarpSize); }
__device__ __forceinline__ void gradients_barrier() { bar_sync(2 + 2 * pair_index(), 2 * kWarpSize); }

// What every thread of the CTA knows of the walk.
struct Cta {
  Smem& smem;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  const float* statistics_g;
  float* dq_acc_g;
  KeyPlace place;
};

// Of the next tile a warp can hold no more than one operand, and that only beside its last products of this one. With
// ONE_PASS the dQ product hides dout's way.
__device__ __forceinline__ void fetch_next(Traits::Feed& feed) {
#if ONE_PASS
  feed.fetch_q();
#else
  feed.store_q();
  feed.fetch_dout();
#endif
}

// The first of each pair: K and dK (dK / scale).
struct KeyWarp {
  uint32 k[1][Traits::kSteps][2];
  float dk[1][Traits::kSteps][4];
  FragmentAddress<Traits::QTile> fragment;

  __device__ __forceinline__ KeyWarp() { clear(dk); }
  __device__ __forceinline__ void take_values(uint32, int) {}
  __device__ __forceinline__ void take_keys(uint32 k_s, int row) { load_a_fragments<Traits::KTile>(k, k_s, row); }
  __device__ __forceinline__ void give_values(uint32, int, const BackwardParams&) const {}
  __device__ __forceinline__ void give_keys(uint32 k_s, int row, const BackwardParams& params) const {
    round_to_tile<Traits::KTile>(k_s, row, dk, params.scale);
  }

  template <int kGroup = 0>
  __device__ __forceinline__ void add_scores(Traits::Grid::Fragment& s, uint32 q_rows_s) const {
#pragma unroll
    for (int n = 0; n < Traits::kSubTiles; n++) {
      add_product_nt<kGroup>(s[n], k, q_rows_s + n * 8 * Traits::QTile::kRowBytes, fragment);
    }
    if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_scores<kGroup + 1>(s, q_rows_s);
  }
  template <int kGroup = 0>
  __device__ __forceinline__ void add_gradients(const uint32 (&ds)[1][2], uint32 q_rows_s) {
    add_product_nn<kGroup>(dk, ds, q_rows_s, fragment);
    if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_gradients<kGroup + 1>(ds, q_rows_s);
  }

  __device__ __forceinline__ void scores(PairScores& pair, uint32 q_rows_s) const {
    Traits::Grid::Fragment s;
    clear(s);
    add_scores(s, q_rows_s);
#pragma unroll
    for (int n = 0; n < Traits::kSubTiles; n++) {
      pair.quads[n][lane_index()] = make_float4(s[n][0][0], s[n][0][1], s[n][0][2], s[n][0][3]);
    }
  }

  // dS^T of 16 keys by 16 queries, two chunks, as A fragments.
  __device__ __forceinline__ void gradients(uint32 ds_s, int row, uint32 q_rows_s) {
    const int lane_row = pair_index() * Traits::kPairKeys + lane_index() % 16;
    uint32 r[4];
    ldmatrix<4>(r, ds_s + Traits::DsTile::offset(lane_row, row / 8 + lane_index() / 16));
    add_gradients({{r[0], r[1]}}, q_rows_s);
    add_gradients({{r[2], r[3]}}, q_rows_s + 8 * Traits::QTile::kRowBytes);
  }

  __device__ __forceinline__ void query_tile(const Cta& cta, Traits::Feed& feed) {
    PairScores& pair = cta.smem.loop.scores[pair_index()];
    scores(pair, feed.q_s);
    scores_barrier();  // pair's S: written
#pragma unroll
    for (int row = 0; row < Traits::kTileQ; row += Traits::kSubRows) {
      const uint32 q_rows_s = feed.q_s + row * Traits::QTile::kRowBytes;
      gradients_barrier();  // pair's dS: written; S: read
      if (row + Traits::kSubRows < Traits::kTileQ) {
        scores(pair, q_rows_s + Traits::kSubRows * Traits::QTile::kRowBytes);
        scores_barrier();  // pair's next S: written
      } else {
        fetch_next(feed);
      }
      gradients(shared_address(cta.smem.loop.ds), row, q_rows_s);
    }
  }
};

// The second: V and dV (boosted).
struct ValueWarp {
  uint32 v[1][Traits::kStepsV][2];
  float dv[1][Traits::kStepsV][4];
  FragmentAddress<Traits::DoutTile> fragment;

  __device__ __forceinline__ ValueWarp() { clear(dv); }
  __device__ __forceinline__ void take_values(uint32 v_s, int row) { load_a_fragments<Traits::VTile>(v, v_s, row); }
  __device__ __forceinline__ void take_keys(uint32, int) {}
  __device__ __forceinline__ void give_values(uint32 v_s, int row, const BackwardParams& params) const {
    const float keep_scale = DROPOUT ? params.attention.scores.keep_scale : 1.f;
    round_to_tile<Traits::VTile>(v_s, row, dv, kUnboost * keep_scale);
  }
  __device__ __forceinline__ void give_keys(uint32, int, const BackwardParams&) const {}

  template <int kGroup = 0>
  __device__ __forceinline__ void add_scores(Traits::Grid::Fragment& dp, uint32 dout_rows_s) const {
#pragma unroll
    for (int n = 0; n < Traits::kSubTiles; n++) {
      add_product_nt<kGroup>(dp[n], v, dout_rows_s + n * 8 * Traits::DoutTile::kRowBytes, fragment);
    }
    if constexpr (kGroup + 1 < chunk_groups(Traits::kStepsV)) add_scores<kGroup + 1>(dp, dout_rows_s);
  }
  template <int kGroup = 0>
  __device__ __forceinline__ void add_gradients(const uint32 (&p)[1][2], uint32 dout_rows_s) {
    add_product_nn<kGroup>(dv, p, dout_rows_s, fragment);
    if constexpr (kGroup + 1 < chunk_groups(Traits::kStepsV)) add_gradients<kGroup + 1>(p, dout_rows_s);
  }

  __device__ __forceinline__ void query_tile(const Cta& cta, Traits::Feed& feed) {
    using T = Traits;
    const PairScores& pair = cta.smem.loop.scores[pair_index()];
    const int pair_row = pair_index() * T::kPairKeys;
    const uint32 ds_lane_s = ds_lane_address<T::DsTile>(shared_address(cta.smem.loop.ds), pair_row);
    const float* rows_g = cta.statistics_g + statistics_offset(feed.scratch_row);
#pragma unroll
    for (int row = 0; row < T::kTileQ; row += T::kSubRows) {
      const uint32 dout_rows_s = feed.dout_s + row * T::DoutTile::kRowBytes;
      const QueryStatistics<T::kSubTiles> statistics(rows_g + row * 2);
      const ScorePlace at = {cta.place.batch, feed.head, feed.first_row() + row, cta.place.first_key + pair_row};
      const ScoreTile<T::Options, T::Grid> tile(cta.params, cta.window, cta.arrays, at, cta.q_offset);
      T::Grid::Fragment s, dp;
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
      T::Grid::Packed p, ds;
      score_gradients<T::Grid>(p, ds, s, dp, statistics, tile, feed.masked());
#pragma unroll
      for (int n = 0; n < T::kSubTiles; n++) {
        store_ds<T::DsTile>(ds_lane_s, row / 8 + n, ds[n]);
      }
      gradients_barrier();  // pair's dS: written; S: read
      if (row + T::kSubRows == T::kTileQ) fetch_next(feed);
#pragma unroll
      for (int n = 0; n < T::kSubTiles; n++) add_gradients(p[n], dout_rows_s + n * 8 * T::DoutTile::kRowBytes);
    }
  }
};

// The CTA's way, as either kind of warp goes it.
template <typename Warp>
__device__ __forceinline__ void run(const Cta& cta, const float16* q_g, const float16* k_g, const float16* v_g,
                                    const float16* dout_g, float16* dk_g, float16* dv_g) {
  using T = Traits;
  Smem& smem = cta.smem;
  const BackwardParams& params = cta.params;
  const KeyPlace& place = cta.place;
  const T::Walk walk(cta.window, place.first_key, T::kKeys, params.attention.sq);
  const uint32 k_s = shared_address(smem.k), v_s = shared_address(smem.v);
  const int pair_row = pair_index() * T::kPairKeys;

  // Phase 2: V and K, through shared memory into registers.
  Warp warp;
  if (walk.tiles() > 0) {
    const int rows = cta.window.keys - place.first_key;
    const Strides &k = params.attention.k, &v = params.attention.v;
    load_rows<T::VTile, T::kHeadDimV, T::kVec, T::kThreads, T::Grid>(
        v_s, head_rows(v_g, v, place.batch, place.kv_head, place.first_key), v.seq, rows);
    cta_barrier();  // v: written
    warp.take_values(v_s, pair_row);
    cta_barrier();  // v: read; K takes its place
    load_rows<T::KTile, T::kHeadDim, T::kVec, T::kThreads, T::Grid>(
        k_s, head_rows(k_g, k, place.batch, place.kv_head, place.first_key), k.seq, rows);
    cta_barrier();  // k: written
    warp.take_keys(k_s, pair_row);
    if (!ONE_PASS) cta_barrier();  // k: read; Q and dout take its place
  }

  // Phase 3: the walk over the query tiles.
  T::Feed feed(params, walk, place, q_g, dout_g, smem.loop.queries);
  feed.begin();
  cta_barrier();  // Q and dout: the first tile has been written
#pragma unroll 1
  for (; feed.left > 0; feed.advance()) {
    if (!ONE_PASS) feed.fetch_q();
    warp.query_tile(cta, feed);
#if ONE_PASS
    cta_barrier();  // Q, dout: read; ds: written
    feed.store_q();
    feed.fetch_dout();
    const int64 tile_at = accumulator_offset<T::kSteps>(feed.scratch_row);
    T::DqWarp().add(cta.dq_acc_g + tile_at, shared_address(smem.loop.ds), shared_address(smem.loop.k));
#endif
    feed.store_dout();
    cta_barrier();  // Q, dout: the next tile has been written; ds: read
  }

  // Phase 4: dV and dK, one after the other through shared memory: fragments hold 4 bytes of a row each.
  const int rows = params.attention.sk - place.first_key;
  warp.give_values(v_s, pair_row, params);
  cta_barrier();  // v: dV is complete
  store_rows<T::VTile, T::kHeadDimV, T::kVec, T::kThreads, T::Grid>(
      head_rows(dv_g, params.dv, place.batch, place.kv_head, place.first_key), params.dv.seq, smem.v, rows,
      params.accumulate);
  cta_barrier();  // v: read; dK takes its place
  warp.give_keys(k_s, pair_row, params);
  cta_barrier();  // k: dK is complete
  store_rows<T::KTile, T::kHeadDim, T::kVec, T::kThreads, T::Grid>(
      head_rows(dk_g, params.dk, place.batch, place.kv_head, place.first_key), params.dk.seq, smem.k, rows,
      params.accumulate);
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dkdv_paired(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                                   const float* statistics_g, float* dq_acc_g, float16* dk_g, float16* dv_g,
                                   void* dbias_g, const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                   const void* mask_g, const void* slopes_g, const BackwardParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];

  // Phase 1: the keys, and the part that this warp has.
  const KeyPlace place(params.attention, Traits::kKeys);
  const KeyWindow window = sequence_window(params.attention, q_offsets_g, seqused_k_g, place.batch);
  const OptionArrays arrays = {bias_g, mask_g, slopes_g, dbias_g};
  const Cta cta = {*reinterpret_cast<Smem*>(shared_bytes),
                   params,
                   window,
                   arrays,
                   query_offset(params.attention, q_offsets_g, place.batch),
                   statistics_g,
                   dq_acc_g,
                   place};
  if (warp_index() < Traits::kPairs) {
    run<KeyWarp>(cta, q_g, k_g, v_g, dout_g, dk_g, dv_g);
  } else {
    run<ValueWarp>(cta, q_g, k_g, v_g, dout_g, dk_g, dv_g);
  }
}
