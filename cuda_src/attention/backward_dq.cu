// Attention backward on tensor cores, second of two deterministic kernels: dQ.
//
//   P = exp(s - lse),  dS = P * (dout V^T - delta),  dQ = softmax_scale * dS K
//
// The forward's walk: a warp keeps its query rows, here Q and dout as A fragments in registers, and goes through the
// keys; S, dP and dS stay in registers, since dS, packed, is the A operand of dQ += dS K. What attention_backward_dkdv
// gathers by atomics is so summed in one order, for the price of computing S and dP again (7 products instead of 5).
//
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kRows = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone. Tiles that need a mask
//           come first (key_walk.cuh); with FULL_LOOP the others have a loop of their own.
// Grid      B * H * ceil(Sq / kRows) CTAs; under causal order the longest rows start first.
// Budget    registers: Q and dout (M_TILES * (D + Dv) / 4) and dQ (M_TILES * D / 2). Shared memory: K and V twice (one
//           half computed, one half filled), or Q or dout before the walk.
// Barriers  one per key tile.
// Edges     rows beyond Sq have L = +inf, hence dS = 0, and are not stored; keys beyond the sequence are zeros and
//           masked.
#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || !defined(TILE_K) || \
    !defined(FULL_LOOP) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, FULL_LOOP, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT)
#error "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP and DROPOUT come from a launch-configuration table"
#endif
#include "key_walk.cuh"
#include "resident_rows.cuh"
#include "score_gradient.cuh"
#include "tile_products.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr bool kFullLoop = FULL_LOOP;  // one of their own for the tiles that every row sees in full
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kRows = WARPS * kWarpRows;
  static constexpr int kSteps = div_up(kHeadDim, 8);    // k8 steps of S, n8 tiles of dQ
  static constexpr int kStepsV = div_up(kHeadDimV, 8);  // k8 steps of dP
  static constexpr int kGroups = chunk_groups(kSteps > kStepsV ? kSteps : kStepsV);
  static constexpr int kKeyTiles = kTileK / 8;

  using QTile = SwizzledTile<kRows, kSteps>;
  using DoutTile = SwizzledTile<kRows, kStepsV>;
  using KTile = SwizzledTile<kTileK, kSteps>;
  using VTile = SwizzledTile<kTileK, kStepsV>;
  static constexpr KeyOrder kOrder = SCORE_VEC == 4 ? KeyOrder::kQuads : KeyOrder::kPairs;
  using KStage = TileStage<KTile, kHeadDim, kVec, kThreads, kOrder>;
  using VStage = TileStage<VTile, kHeadDimV, kVec, kThreads, kOrder>;
  static constexpr int kQuads = KStage::kQuads > VStage::kQuads ? KStage::kQuads : VStage::kQuads;
  using Grid = ScoreGrid<kMTiles, kKeyTiles, Along::kN8, SCORE_VEC>;
  using Options = GradientOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, void, false, false>;
  using Walk = KeyWalk<kTileK>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileK % 16 == 0, "dropout draws for 16 keys at a time");
};

union Smem {
  struct {
    alignas(128) unsigned char k[2][Traits::KTile::kBytes];
    alignas(128) unsigned char v[2][Traits::VTile::kBytes];
  } loop;
  alignas(128) unsigned char q[Traits::QTile::kBytes];  // Q before the walk, dQ after it
  alignas(128) unsigned char dout[Traits::DoutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// What a warp keeps in registers through the walk.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2], dout[Traits::kMTiles][Traits::kStepsV][2];  // A fragments
  float dq[Traits::kMTiles][Traits::kSteps][4];                                             // dQ / scale
  int first_row;                                                                            // of the sequence
};

// What every thread of the CTA knows of the walk.
struct Cta {
  uint32 k_s, v_s;
  FragmentAddress<Traits::KTile> k_fragment;
  FragmentAddress<Traits::VTile> v_fragment;
  Traits::KStage k_stage;
  Traits::VStage v_stage;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  Place place;
};

// S += Q K^T and dP += dout V^T over the columns of a group and those behind it, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Grid::Fragment& s, Traits::Grid::Fragment& dp, const Warp& warp,
                                           const Cta& cta, uint32 k_s, uint32 v_s) {
  using T = Traits;
#pragma unroll
  for (int n = 0; n < T::kKeyTiles; n++) {
    add_product_nt<kGroup>(s[n], warp.q, k_s + n * 8 * T::KTile::kRowBytes, cta.k_fragment);
    add_product_nt<kGroup>(dp[n], warp.dout, v_s + n * 8 * T::VTile::kRowBytes, cta.v_fragment);
  }
  if constexpr (kGroup + 1 < T::kGroups) add_scores<kGroup + 1>(s, dp, warp, cta, k_s, v_s);
}

// dQ += dS K for 8 keys, likewise.
template <int kGroup = 0>
__device__ __forceinline__ void add_dq(Warp& warp, const Cta& cta, const uint32 (&ds)[Traits::kMTiles][2], uint32 k_s) {
  add_product_nn<kGroup>(warp.dq, ds, k_s, cta.k_fragment);
  if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_dq<kGroup + 1>(warp, cta, ds, k_s);
}

// One key tile: compute it from one half of the K and V buffers while the next one, at next_k_g and next_v_g, is
// fetched to registers and from there to the other half. kRagged: that one may have fewer keys than a tile.
template <bool kRagged>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, const RowStatistics<Traits::kMTiles>& statistics,
                                         int first_key, bool masked, int parity, bool more, const char* next_k_g,
                                         const char* next_v_g, int next_valid) {
  using T = Traits;
  const uint32 k_s = cta.k_s + parity * T::KTile::kBytes, v_s = cta.v_s + parity * T::VTile::kBytes;
  const uint32 next_k_s = cta.k_s + (parity ^ 1) * T::KTile::kBytes;
  const uint32 next_v_s = cta.v_s + (parity ^ 1) * T::VTile::kBytes;

  const ScorePlace place = {cta.place.batch, cta.place.head, warp.first_row, first_key};
  const ScoreTile<T::Options, T::Grid> tile(cta.params, cta.window, cta.arrays, place, cta.q_offset);
  uint4 quads[T::kQuads];
  if (more) cta.k_stage.template load<kRagged>(quads, next_k_g, cta.params.attention.k.seq, next_valid);
  T::Grid::Fragment s, dp;
  clear(s);
  clear(dp);
  add_scores(s, dp, warp, cta, k_s, v_s);
  if (more) {
    cta.k_stage.store(next_k_s, quads);
    __syncwarp();  // ptxas else lets these stores wait for those loads
    cta.v_stage.template load<kRagged>(quads, next_v_g, cta.params.attention.v.seq, next_valid);
  }
  T::Grid::Packed p, ds;
  score_gradients<T::Grid>(p, ds, s, dp, statistics, tile, masked);
#pragma unroll
  for (int n = 0; n < T::kKeyTiles; n++) add_dq(warp, cta, ds[n], k_s + n * 8 * T::KTile::kRowBytes);
  if (more) cta.v_stage.store(next_v_s, quads);
  __syncthreads();  // K and V: this half has been read, the other one written
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dq(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                          const float* statistics_g, float16* dq_g, const void* q_offsets_g, const void* seqused_k_g,
                          const void* bias_g, const void* mask_g, const void* slopes_g, const BackwardParams params) {
  using T = Traits;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(shared_bytes);
  const AttentionParams& attention = params.attention;

  // Phase 1: the rows, and the keys that they see. Under causal order later rows see more keys: they start first.
  const Place place = place_of_cta(attention, T::kRows, /*last_rows_first=*/true);
  const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, place.batch);
  const int rows = min(T::kRows, attention.sq - place.first_row), warp_row = warp_index() * T::kWarpRows;
  const T::Walk walk(window, place.first_row, rows);
  const OptionArrays arrays = {bias_g, mask_g, slopes_g, nullptr};

  // Phase 2: Q and dout, through shared memory into registers.
  Warp warp;
  warp.first_row = place.first_row + warp_row;
  clear(warp.dq);
  load_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      shared_address(smem.q), head_rows(q_g, attention.q, place.batch, place.head, place.first_row), attention.q.seq,
      rows);
  __syncthreads();  // q: written
  load_a_fragments<T::QTile>(warp.q, shared_address(smem.q), warp_row);
  __syncthreads();  // q: read; dout takes its place
  load_rows<T::DoutTile, T::kHeadDimV, T::kVec, T::kThreads>(
      shared_address(smem.dout), head_rows(dout_g, params.dout, place.batch, place.head, place.first_row),
      params.dout.seq, rows);
  __syncthreads();  // dout: written
  load_a_fragments<T::DoutTile>(warp.dout, shared_address(smem.dout), warp_row);
  RowStatistics<T::kMTiles> statistics(statistics_g, params, place.batch, place.head, warp.first_row);
  __syncthreads();  // dout: read; K and V take its place

  // Phase 3: the walk over the keys.
  Cta cta = {shared_address(smem.loop.k),
             shared_address(smem.loop.v),
             {},
             {},
             T::KStage(attention.k.seq),
             T::VStage(attention.v.seq),
             params,
             window,
             arrays,
             query_offset(attention, q_offsets_g, place.batch),
             place};
  const char* k_rows_g = T::KStage::lowest(head_rows(k_g, attention.k, place.batch, place.kv_head, 0), attention.k.seq);
  const char* v_rows_g = T::VStage::lowest(head_rows(v_g, attention.v, place.batch, place.kv_head, 0), attention.v.seq);
  const int64 k_tile_bytes = attention.k.seq * T::kTileK * sizeof(float16);
  const int64 v_tile_bytes = attention.v.seq * T::kTileK * sizeof(float16);
  int tile = walk.first, left = walk.tiles();
  const int full = left - walk.masked;
  const int in_full = T::kFullLoop ? full : 0;  // tiles of the second loop
  if (left > 0) {
    uint4 quads[T::kQuads];
    const int valid = window.keys - tile * T::kTileK;
    cta.k_stage.load<true>(quads, k_rows_g + tile * k_tile_bytes, attention.k.seq, valid);
    cta.k_stage.store(cta.k_s + (left & 1) * T::KTile::kBytes, quads);
    cta.v_stage.load<true>(quads, v_rows_g + tile * v_tile_bytes, attention.v.seq, valid);
    cta.v_stage.store(cta.v_s + (left & 1) * T::VTile::kBytes, quads);
  }
  __syncthreads();  // K and V: the first tile has been written
#pragma unroll 1
  for (; left > in_full; left--) {
    const int next = walk.after(tile);
    key_tile<true>(warp, cta, statistics, tile * T::kTileK, T::kFullLoop || left > full, left & 1, left > 1,
                   k_rows_g + next * k_tile_bytes, v_rows_g + next * v_tile_bytes, window.keys - next * T::kTileK);
    tile = next;
  }
  if constexpr (T::kFullLoop) {
    const char *next_k_g = k_rows_g + tile * k_tile_bytes, *next_v_g = v_rows_g + tile * v_tile_bytes;
    statistics.renew();
    cta.k_stage.renew();
    cta.v_stage.renew();
#pragma unroll 1
    for (; left > 0; left--, tile++) {
      next_k_g += k_tile_bytes;
      next_v_g += v_tile_bytes;
      key_tile<false>(warp, cta, statistics, tile * T::kTileK, false, left & 1, left > 1, next_k_g, next_v_g,
                      T::kTileK);
    }
  }

  // Phase 4: dQ, through shared memory: fragments hold 4 bytes of a row each.
  round_to_tile<T::QTile>(shared_address(smem.q), warp_row, warp.dq, params.scale);
  __syncthreads();  // q: dQ is complete
  store_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      head_rows(dq_g, params.dq, place.batch, place.head, place.first_row), params.dq.seq, smem.q, rows,
      params.accumulate);
}
