// Attention backward on tensor cores, second of two deterministic kernels: dQ.
//
//   P = exp(s - lse),  dS = P * (dout V^T - delta),  dQ = softmax_scale * dS K
//
// The forward's loop: a warp keeps its query rows, here Q and dout as A fragments in registers, and goes through the
// keys; S, dP and dS stay in registers, since dS, packed, is the A operand of dQ += dS K. What attention_backward_dkdv
// gathers by atomics is so summed in one order, for the price of computing S and dP again (7 products instead of 5).
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); head dims
//           in steps of 8 columns, zero-filled.
// Tiles     kRows = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone. Tiles that need a mask
//           come first (key_loop.cuh); with FULL_LOOP the others have a separate loop.
// Grid      B * H * ceil(Sq / kRows) CTAs; under causal order the longest rows start first.
// Budget    registers: Q and dout (M_TILES * (D + Dv) / 4) and dQ (M_TILES * D / 2). Shared memory: K and V twice (one
//           half computed, one half filled), or Q or dout before the loop.
// Barriers  one per key tile.
// Edges     rows beyond Sq have L = +inf, hence dS = 0, and are not stored; keys beyond the sequence are zeros and
//           masked.
#if !defined(DTYPE) || !defined(NATIVE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || \
    !defined(WARPS) || !defined(TILE_K) || !defined(FULL_LOOP) || !defined(VEC) || !defined(MIN_CTAS) ||      \
    !defined(SHARED_BYTES) || !defined(L2_AHEAD)
#error \
    "DTYPE, NATIVE, HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, FULL_LOOP, VEC, MIN_CTAS, SHARED_BYTES, L2_AHEAD come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(MODIFIED)
#error "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT and MODIFIED come from a launch-configuration table"
#endif
#include "../backward_sequences.cuh"
#include "key_loader.cuh"
#include "products.cuh"
#include "resident_rows.cuh"
#include "score_gradient.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr bool kFullLoop = FULL_LOOP;  // a separate one for the tiles that every row sees in full
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kRows = WARPS * kWarpRows;
  static constexpr int kSteps = div_up(kHeadDim, 8);    // k8 steps of S, n8 tiles of dQ
  static constexpr int kStepsV = div_up(kHeadDimV, 8);  // k8 steps of dP
  static constexpr int kGroups = chunk_groups(kSteps > kStepsV ? kSteps : kStepsV);
  static constexpr int kKeyTiles = kTileK / 8;
  static constexpr int kTogether = MMA_K / 8;  // n8 tiles of dS in one product
  static constexpr bool kNative = NATIVE;      // sm_80 or later: copies to shared memory

  using QTile = SwizzledTile<kRows, kSteps>;
  using DoutTile = SwizzledTile<kRows, kStepsV>;
  using KTile = SwizzledTile<kTileK, kSteps>;
  using VTile = SwizzledTile<kTileK, kStepsV>;
  using Tile = ScoreTile<kMTiles, kKeyTiles, Along::kN8, SCORE_VEC>;
  using KTileLoader = TileLoader<KTile, kHeadDim, kVec, kThreads, Tile>;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kThreads, Tile>;
  using Loader = KeyLoader<KTileLoader, VTileLoader>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Dbias = DbiasOptions<void, false>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileK % 16 == 0, "dropout draws for 16 keys at a time");
};

union Smem {
  Traits::Loader::Tiles keys;
  alignas(128) unsigned char q[Traits::QTile::kBytes];  // Q before the loop, dQ after it
  alignas(128) unsigned char dout[Traits::DoutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2], dout[Traits::kMTiles][Traits::kStepsV][2];  // A fragments
  float dq[Traits::kMTiles][Traits::kSteps][4];                                             // dQ / scale
  int first_row;                                                                            // of the sequence
};

// Values that are the same for all threads of the CTA.
struct Cta {
  FragmentAddress<Traits::KTile> k_fragment;
  FragmentAddress<Traits::VTile> v_fragment;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  TileCoordinates coords;
  GradientScale scale;
};

// S += Q K^T and dP += dout V^T over the columns from this group on, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Traits::Tile::Fragment& s, Traits::Tile::Fragment& dp, const Warp& warp,
                                           const Cta& cta, uint32 k_s, uint32 v_s) {
  using T = Traits;
#pragma unroll
  for (int n = 0; n < T::kKeyTiles; n++) {
    add_product_nt<kGroup, DTYPE>(s[n], warp.q, k_s + n * 8 * T::KTile::kRowBytes, cta.k_fragment);
    add_product_nt<kGroup, DTYPE>(dp[n], warp.dout, v_s + n * 8 * T::VTile::kRowBytes, cta.v_fragment);
  }
  if constexpr (kGroup + 1 < T::kGroups) add_scores<kGroup + 1>(s, dp, warp, cta, k_s, v_s);
}

// dQ += dS K for 8 keys, likewise.
template <int kGroup = 0>
__device__ __forceinline__ void add_dq(Warp& warp, const Cta& cta, const uint32 (&ds)[Traits::kMTiles][2], uint32 k_s) {
  add_product_nn<kGroup, DTYPE>(warp.dq, ds, k_s, cta.k_fragment);
  if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_dq<kGroup + 1>(warp, cta, ds, k_s);
}

// Copies of a tile of keys on their way to a half.
template <bool kRagged>
__device__ __forceinline__ void copy_keys(const Traits::Loader& loader, int half, const KeyRows& from, int keys) {
  if constexpr (Traits::kNative) {
    loader.k_loader.template copy<kRagged>(loader.k_s(half), from.k_g, loader.k.seq, keys);
    loader.v_loader.template copy<kRagged>(loader.v_s(half), from.v_g, loader.v.seq, keys);
    cp_async_commit_group();
  }
}

// One key tile, from one half of the K and V buffers, while the next one is brought to the other half. kRagged: that
// may have fewer keys than a tile. `state`: what the warp sees of this one.
template <bool kRagged>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, const Traits::Loader& loader,
                                         const RowStatistics<Traits::kMTiles>& statistics, int first_key, bool masked,
                                         uint32 state, int half, bool more, const KeyRows& next, int next_keys) {
  using T = Traits;
  const uint32 k_s = loader.k_s(half), v_s = loader.v_s(half);
  // Formed here: where there may be no next tile, each use would form its own.
  const uint32 next_k_s = loader.k_s(half ^ 1), next_v_s = loader.v_s(half ^ 1);
  const ScoreCoordinates coords = {cta.coords.batch, cta.coords.head, warp.first_row, first_key};
  const TileOptions<T::Options, T::Dbias, T::Tile> tile(cta.params, cta.window, cta.arrays, coords, cta.scale,
                                                        cta.q_offset);
  T::Loader::Quads quads;
  if (T::kNative) {
    if (more) copy_keys<kRagged>(loader, half ^ 1, next, next_keys);
  } else if (more) {
    loader.fetch_k<kRagged>(quads, next, next_keys);
  }
  T::Tile::Fragment s, dp;
  if (state != kEmpty) {
    clear(s);
    clear(dp);
    add_scores(s, dp, warp, cta, k_s, v_s);
  }
  if (!T::kNative && more) {
    loader.store_k(quads, next_k_s);
    __syncwarp();  // no buffer: ptxas would otherwise load V first, and the stores of K then wait for V
    loader.fetch_v<kRagged>(quads, next, next_keys);
  }
  if (state != kEmpty) {
    T::Tile::Packed p, ds;
    score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, masked, state != kFull);
#pragma unroll
    for (int n = 0; n < T::kKeyTiles; n += T::kTogether) {
      const uint32 rows_s = k_s + n * 8 * T::KTile::kRowBytes;
      if constexpr (T::kTogether == 2) {
        add_sixteen_nn<DTYPE>(warp.dq, ds[n], ds[n + 1], rows_s, SixteenRows<T::KTile>::by_rows());
      } else {
        add_dq(warp, cta, ds[n], rows_s);
      }
    }
  }
  if (!T::kNative && more) loader.store_v(quads, next_v_s);
  if constexpr (T::kNative) cp_async_wait_group<0>();
  __syncthreads();  // K and V: this half has been read, the other one written
}

// The CTA's arrays.
struct Arrays {
  const DTYPE *q_g, *k_g, *v_g, *dout_g;
  const float* statistics_g;
  DTYPE* dq_g;
  OptionArrays options;
};

// dQ of the query rows of one CTA. `q_offset()` is the key position of query 0, `scratch_batch` is the sequence's
// number in scratch memory.
template <typename Offset>
__device__ __forceinline__ void add_up_dq(const BackwardParams& params, const Arrays& arrays,
                                          const TileCoordinates& coords, const KeyWindow& window, Offset q_offset,
                                          int scratch_batch) {
  using T = Traits;
  Smem& smem = dynamic_shared<Smem>();
  const AttentionParams& attention = params.attention;

  // Phase 1: the rows, and the keys that they see.
  const int rows = min(T::kRows, attention.sq - coords.first_row), warp_row = warp_index() * T::kWarpRows;
  const auto loop = loop_over_keys<T::kRows, T::kTileK>(window, coords, rows, arrays.options.modifiers.blocks);

  // Phase 2: Q and dout, through shared memory into registers.
  Warp warp;
  warp.first_row = coords.first_row + warp_row;
  clear(warp.dq);
  load_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      shared_address(smem.q), head_rows(arrays.q_g, attention.q, coords.batch, coords.head, coords.first_row),
      attention.q.seq, rows);
  __syncthreads();  // q: written
  load_a_fragments<T::QTile>(warp.q, shared_address(smem.q), warp_row);
  __syncthreads();  // q: read; dout takes its place
  const ScaleArrays& scales = arrays.options.scales;
  const GradientScale scale = scales.of_head(params, coords.batch, coords.head);
  scales.set_aside(scale);
  load_rows<T::DoutTile, T::kHeadDimV, T::kVec, T::kThreads, RowsInOrder>(
      shared_address(smem.dout), head_rows(arrays.dout_g, params.dout, coords.batch, coords.head, coords.first_row),
      params.dout.seq, rows, ChunksTimes<T::kHeadDimV, T::kVec>(scale.down));
  __syncthreads();  // dout: written
  load_a_fragments<T::DoutTile>(warp.dout, shared_address(smem.dout), warp_row);
  RowStatistics<T::kMTiles> statistics(arrays.statistics_g, params, scratch_batch, coords.head, warp.first_row);
  __syncthreads();  // dout: read; K and V take its place

  // Phase 3: the loop over the keys.
  const Cta cta = {{}, {}, params, window, arrays.options, q_offset(), coords, scale};
  T::Loader loader(attention, coords, arrays.k_g, arrays.v_g, smem.keys);
  auto tile = loop.first, next_tile = loop.after(tile);
  int left = loop.tiles();
  const int full = left - loop.masked;
  KeyRows next = loader.rows(tile);
  if (left > 0 && T::kNative) {
    copy_keys<true>(loader, left & 1, next, window.keys - tile * T::kTileK);
    if constexpr (T::kNative) cp_async_wait_group<0>();
  } else if (left > 0) {
    loader.bring(next, window.keys - tile * T::kTileK, left & 1);
  }
  __syncthreads();  // K and V: the first tile has been written
#pragma unroll 1
  for (; left > (T::kFullLoop ? full : 0); left--) {
    if (!Modifiers::kBlocks) next_tile = loop.after(tile);  // carried along, it would take a register
    const auto after_next = loop.after(next_tile);
    next = loader.rows(next_tile);
    const bool masked = Modifiers::kBlocks ? loop.cuts(tile) : T::kFullLoop || left > full;
    key_tile<true>(warp, cta, loader, statistics, tile * T::kTileK, masked, state_of(tile, warp_index()), left & 1,
                   left > 1, next, window.keys - next_tile * T::kTileK);
    tile = next_tile;
    next_tile = after_next;
  }
  if constexpr (T::kFullLoop) {
    statistics.renew();
    loader.renew();
#pragma unroll 1
    for (; left > 0; left--) {
      if (!Modifiers::kBlocks) next_tile = loop.whole_after(tile);
      const auto after_next = loop.whole_after(next_tile);
      next = Modifiers::kBlocks ? loader.rows(next_tile) : loader.rows_after(next);
      if constexpr (!Modifiers::kBlocks) loader.bring_to_l2<L2_AHEAD>(next, left);
      key_tile<false>(warp, cta, loader, statistics, tile * T::kTileK, false, kFull, left & 1, left > 1, next,
                      T::kTileK);
      tile = next_tile;
      next_tile = after_next;
    }
  }

  // Phase 4: dQ, through shared memory: fragments hold 4 bytes of a row each.
  round_to_tile<T::QTile, DTYPE>(shared_address(smem.q), warp_row, warp.dq, params.scale * scales.up());
  __syncthreads();  // q: dQ is complete
  store_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      head_rows(arrays.dq_g, params.dq, coords.batch, coords.head, coords.first_row), params.dq.seq, smem.q, rows,
      params.accumulate);
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_backward_dq)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g,
                                 const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                 DTYPE* dq_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
                                 const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                 const GradientParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kRows, Traits::kTileK> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  if (!own.exist()) return;
  const AttentionParams& longest = sequences.attention;
  const TileCoordinates coords = own.coords();
  const auto& backward = params_of(params, own.queries(), own.keys());
  const RowSpan queries = own.queries(), keys = own.keys();
  const ScratchBatch scratch(queries, coords.batch);
  add_up_dq(
      backward,
      {rows_from(q_g, longest.q, queries),
       rows_from(k_g, longest.k, keys),
       rows_from(v_g, longest.v, keys),
       rows_from(dout_g, backward.dout, queries),
       statistics_g + statistics_offset(scratch.begin),
       rows_from(dq_g, backward.dq, queries),
       {bias_g, mask_g, slopes_g, nullptr, modifiers, {scales_g, cta_scales_g}}},
      coords, own.window(), [&] { return own.q_offset(); }, scratch.batch);
}
