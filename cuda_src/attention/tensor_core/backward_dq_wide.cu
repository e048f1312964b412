// Attention backward on tensor cores for head dims of more than 256 columns, second of two deterministic kernels: dQ,
// as attention_backward_dq computes it (see there).
//
// Here all warps of a CTA share 32 query rows, by columns. Half of the warps keep their columns of Q and of dQ: parts
// of S = Q K^T, and later dQ += dS K. The others keep their columns of dout: parts of dP = dout V^T. They also bring K
// and V, add up the parts, which go through shared memory, and turn the scores into dS.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); head dims
//           in steps of 128 columns, zero-filled.
// Tiles     kRows = 32 query rows by TILE_K = 16 keys; a warp's slice is a quarter of the columns.
// Grid      B * H * ceil(Sq / kRows) CTAs; under causal order the longest rows start first.
// Budget    registers: Q and dQ: 3 / 8 of the head dim. Shared memory: K and V (NATIVE: twice), the parts of S and dP,
//           and dS; or Q or dout before the loop.
// Barriers  per key tile four of the CTA, at three of which one kind of warps does not wait; NATIVE: three and one of
//           the warps of dout.
// Edges     as attention_backward_dq.
#if !defined(DTYPE) || !defined(NATIVE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) || \
    !defined(TILE_K) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, NATIVE, HEAD_DIM, HEAD_DIM_V, WARPS, TILE_K, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(MODIFIED)
#error "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT and MODIFIED come from a launch-configuration table"
#endif
#include "../../common/barrier.cuh"
#include "../backward_sequences.cuh"
#include "key_loader.cuh"
#include "products.cuh"
#include "resident_rows.cuh"
#include "score_gradient.cuh"

struct Traits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kSlices = WARPS / 2;
  static constexpr int kLoadingThreads = kSlices * kWarpSize;  // the first ones: the warps of dout
  static constexpr int kRowTiles = 2;                          // m16 tiles of a CTA's queries
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kKeyTiles = kTileK / 8;
  static constexpr int kSteps = slice_steps(kHeadDim, kSlices) * kSlices;
  static constexpr int kStepsV = slice_steps(kHeadDimV, kSlices) * kSlices;
  static constexpr bool kNative = NATIVE;  // sm_80 or later: copies to shared memory
  static constexpr int kHalves = kNative ? 2 : 1;

  using QTile = SwizzledTile<kRows, kSteps>;
  using DoutTile = SwizzledTile<kRows, kStepsV>;
  using KTile = SwizzledTile<kTileK, kSteps>;
  using VTile = SwizzledTile<kTileK, kStepsV>;
  using DsTile = SwizzledTile<kRows, kKeyTiles>;
  // Of a warp of dout: dropout draws for 16 keys at a time, and neighbouring keys are in two n8 tiles.
  static constexpr int kSubTiles = DROPOUT || SCORE_VEC > 1 ? kKeyTiles : kKeyTiles * kRowTiles / kSlices;
  static constexpr int kSharers = kRowTiles * kKeyTiles / kSubTiles;  // warps that have a share of the scores
  using Tile = ScoreTile<1, kSubTiles, Along::kN8, SCORE_VEC>;
  using KTileLoader = TileLoader<KTile, kHeadDim, kVec, kLoadingThreads, Tile>;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kLoadingThreads, Tile>;
  using Loader = KeyLoader<KTileLoader, VTileLoader, KeyTiles<KTile, VTile, kHalves>>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Dbias = DbiasOptions<void, false>;
  using Parts = PartialScores<kSlices, kKeyTiles, kRowTiles>;
  template <typename RowsTile, typename KeysTile>
  using Slice = ColumnSlice<RowsTile, KeysTile, kSlices, kRowTiles, kKeyTiles>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kTileK == 16 && kSlices == 4, "a share of the scores for each warp of dout, or for two of them");
};

union Smem {
  struct {
    Traits::Loader::Tiles keys;
    alignas(128) Traits::Parts s, dp;
    alignas(128) unsigned char ds[Traits::DsTile::kBytes];
  } loop;
  alignas(128) unsigned char q[Traits::QTile::kBytes];  // Q before the loop, dQ after it
  alignas(128) unsigned char dout[Traits::DoutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// Counted, because the two kinds of warps reach it from different places in the code.
struct CountedBarrier {
  __device__ __forceinline__ static void wait() { bar_sync(0, Traits::kThreads); }
};
__device__ __forceinline__ int slice_index() { return warp_index() % Traits::kSlices; }

// The warps of dout wait for the parts of S, and until K has been read; those of Q for the next K.
__device__ __forceinline__ void arrive_with_scores() { bar_arrive(1, Traits::kThreads); }
__device__ __forceinline__ void wait_for_scores() { bar_sync(1, Traits::kThreads); }
__device__ __forceinline__ void arrive_without_keys() { bar_arrive(2, Traits::kThreads); }
__device__ __forceinline__ void wait_until_keys_are_read() { bar_sync(2, Traits::kThreads); }
__device__ __forceinline__ void arrive_with_keys() { bar_arrive(3, Traits::kThreads); }
__device__ __forceinline__ void wait_for_keys() { bar_sync(3, Traits::kThreads); }
__device__ __forceinline__ void copies_barrier() { bar_sync(4, Traits::kLoadingThreads); }

// Values that are the same for all threads of the CTA.
struct Cta {
  Smem& smem;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  const float* statistics_g;
  TileCoordinates coords;
  int scratch_batch;
  GradientScale scale;
};

// One key tile of the loop, and the next one.
struct KeyStep {
  int first_key;
  bool masked;
  uint32 states;  // of this tile's parts
  int half;       // of the buffers, where this tile is
  bool more;
  KeyRows next;
  int next_keys;
};

// A warp's columns of Q and of dQ / scale.
struct QueryWarp : Traits::Slice<Traits::QTile, Traits::KTile> {
  static constexpr bool kOfQueries = true;

  Sums dq;

  __device__ __forceinline__ explicit QueryWarp(const Cta&) : ColumnSlice(slice_index()) { clear(dq); }

  __device__ __forceinline__ void take(uint32 q_s) { load_a_fragments<Traits::QTile>(rows, q_s, 0, first_chunk); }
  __device__ __forceinline__ void give(uint32 q_s, float scale) const {
    round_to_tile<Traits::QTile, DTYPE>(q_s, 0, dq, scale, first_chunk);
  }
  __device__ __forceinline__ void begin(const Traits::Loader&, const KeyRows&, int, int) const {}

  __device__ __forceinline__ void key_tile(const Cta& cta, const Traits::Loader& loader, const KeyStep& step) {
    const uint32 k_s = loader.k_s(step.half);
    put_scores<DTYPE>(cta.smem.loop.s, k_s);
    arrive_with_scores();    // s: written; ds, K of the tile before: read
    CountedBarrier::wait();  // ds: written; s, dp: read
    add_weighted<DTYPE>(dq, shared_address(cta.smem.loop.ds), k_s, [] {});
    if (!Traits::kNative) arrive_without_keys();  // K: read
    wait_for_keys();                              // K: the next tile has been written
  }
};

// A warp's columns of dout, and its share of the scores and of the loads.
struct DoutWarp : Traits::Slice<Traits::DoutTile, Traits::VTile> {
  static constexpr bool kOfQueries = false;

  RowStatistics<1> statistics;  // of the m16 tile of the warp's scores

  __device__ __forceinline__ explicit DoutWarp(const Cta& cta)
      : ColumnSlice(slice_index()),
        statistics(cta.statistics_g, cta.params, cta.scratch_batch, cta.coords.head, first_row(cta)) {}

  // The warp's share of the scores.
  __device__ __forceinline__ static int row_tile() { return slice_index() % Traits::kRowTiles; }
  __device__ __forceinline__ static int first_key_tile() {
    return slice_index() / Traits::kRowTiles * Traits::kSubTiles;
  }
  __device__ __forceinline__ static int first_row(const Cta& cta) { return cta.coords.first_row + row_tile() * 16; }

  __device__ __forceinline__ void take(uint32 dout_s) {
    load_a_fragments<Traits::DoutTile>(rows, dout_s, 0, first_chunk);
  }
  __device__ __forceinline__ void give(uint32, float) const {}

  // The first tile, all the way.
  __device__ __forceinline__ void begin(const Traits::Loader& loader, const KeyRows& from, int keys, int half) const {
    if constexpr (Traits::kNative) {
      copy(loader, from, keys, half);
      cp_async_wait_group<0>();
    } else {
      loader.bring(from, keys, half);
    }
  }
  __device__ __forceinline__ static void copy(const Traits::Loader& loader, const KeyRows& from, int keys, int half) {
    if constexpr (Traits::kNative) {
      loader.k_loader.template copy<true>(loader.k_s(half), from.k_g, loader.k.seq, keys);
      loader.v_loader.template copy<true>(loader.v_s(half), from.v_g, loader.v.seq, keys);
      cp_async_commit_group();
    }
  }

  __device__ __forceinline__ void key_tile(const Cta& cta, const Traits::Loader& loader, const KeyStep& step) const {
    using T = Traits;
    auto& smem = cta.smem.loop;
    const ScoreCoordinates at = {cta.coords.batch, cta.coords.head, first_row(cta),
                                 step.first_key + first_key_tile() * 8};
    const TileOptions<T::Options, T::Dbias, T::Tile> tile(cta.params, cta.window, cta.arrays, at, cta.scale,
                                                          cta.q_offset);
    // V, then K: both at once would keep L2 busy for longer than the products of a tile take.
    T::Loader::Quads k_quads, v_quads;
    if (!T::kNative && step.more) loader.fetch_v<true>(v_quads, step.next, step.next_keys);
    put_scores<DTYPE>(smem.dp, loader.v_s(step.half));
    wait_for_scores();  // s, dp: written; V: read; ds and K of the tile before: read
    const bool shares = T::kSharers == T::kSlices || slice_index() < T::kSharers;
    T::Tile::Fragment s, dp;
    if (shares) {
      smem.s.sum(s, first_key_tile(), row_tile());
      smem.dp.sum(dp, first_key_tile(), row_tile());
    }
    if (T::kNative && step.more) {
      copy(loader, step.next, step.next_keys, step.half ^ 1);
    } else if (step.more) {
      loader.fetch_k<true>(k_quads, step.next, step.next_keys);
    }
    if (shares) put_score_gradients(cta, tile, step, s, dp);
    CountedBarrier::wait();  // ds: written; s, dp: read
    if constexpr (T::kNative) {
      cp_async_wait_group<0>();
      copies_barrier();  // K and V: the next tile has been written
    } else {
      if (step.more) loader.store_v(v_quads, loader.v_s(0));
      wait_until_keys_are_read();  // V: the next tile has been written
      if (step.more) loader.store_k(k_quads, loader.k_s(0));
    }
    arrive_with_keys();
  }

 private:
  // dS of the warp's share.
  template <typename TileOptions>
  __device__ __forceinline__ void put_score_gradients(const Cta& cta, const TileOptions& tile, const KeyStep& step,
                                                      Traits::Tile::Fragment& s, Traits::Tile::Fragment& dp) const {
    using T = Traits;
    T::Tile::Packed p, ds;
    const uint32 state = step.states >> (kStateBits * row_tile()) & (kPartial | kFull);
    score_gradients<T::Tile>(p, ds, s, dp, statistics, tile, step.masked, state != kFull);
#pragma unroll
    for (int n = 0; n < T::kSubTiles; n++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = row_tile() * 16 + half * 8 + lane_index() / 4;
        const uint32 at = T::DsTile::offset(row, first_key_tile() + n) + lane_index() % 4 * 4;
        st_shared_u32(shared_address(cta.smem.loop.ds) + at, ds[n][0][half]);
      }
    }
  }
};

// The CTA's arrays.
struct Arrays {
  const DTYPE *q_g, *k_g, *v_g, *dout_g;
  const float* statistics_g;
  DTYPE* dq_g;
  OptionArrays options;
};

// dQ of the query rows of one CTA, by one of the two kinds of warps.
template <typename Warp>
__device__ __forceinline__ void run(const Cta& cta, const Arrays& arrays) {
  using T = Traits;
  Smem& smem = cta.smem;
  const BackwardParams& params = cta.params;
  const AttentionParams& attention = params.attention;
  const TileCoordinates& coords = cta.coords;

  // Phase 1: the rows, and the keys that they see.
  const int rows = min(T::kRows, attention.sq - coords.first_row);
  const auto loop = loop_over_keys<T::kRows, T::kTileK>(cta.window, coords, rows, cta.arrays.modifiers.blocks);

  // Phase 2: Q and dout, through shared memory into registers.
  Warp warp(cta);
  load_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      shared_address(smem.q), head_rows(arrays.q_g, attention.q, coords.batch, coords.head, coords.first_row),
      attention.q.seq, rows);
  CountedBarrier::wait();  // q: written
  if (Warp::kOfQueries) warp.take(shared_address(smem.q));
  CountedBarrier::wait();  // q: read; dout takes its place
  load_rows<T::DoutTile, T::kHeadDimV, T::kVec, T::kThreads, RowsInOrder>(
      shared_address(smem.dout), head_rows(arrays.dout_g, params.dout, coords.batch, coords.head, coords.first_row),
      params.dout.seq, rows, ChunksTimes<T::kHeadDimV, T::kVec>(cta.scale.down));
  CountedBarrier::wait();  // dout: written
  if (!Warp::kOfQueries) warp.take(shared_address(smem.dout));
  CountedBarrier::wait();  // dout: read; K and V take its place

  // Phase 3: the loop over the keys.
  const T::Loader loader(attention, coords, arrays.k_g, arrays.v_g, smem.loop.keys);
  auto tile = loop.first, next_tile = loop.after(tile);
  int left = loop.tiles();
  const int full = left - loop.masked;
  if (left > 0) {
    warp.begin(loader, loader.rows(tile), cta.window.keys - tile * T::kTileK, T::kHalves == 2 ? left & 1 : 0);
  }
  CountedBarrier::wait();  // K and V: the first tile has been written
#pragma unroll 1
  for (; left > 0; left--) {
    const auto after_next = loop.after(next_tile);
    const bool masked = Modifiers::kBlocks ? loop.cuts(tile) : left > full;
    warp.key_tile(cta, loader,
                  {tile * T::kTileK, masked, states_of(tile), T::kHalves == 2 ? left & 1 : 0, left > 1,
                   loader.rows(next_tile), cta.window.keys - next_tile * T::kTileK});
    tile = next_tile;
    next_tile = after_next;
  }

  // Phase 4: dQ, through shared memory: fragments hold 4 bytes of a row each.
  warp.give(shared_address(smem.q), params.scale * cta.arrays.scales.up());
  CountedBarrier::wait();  // q: dQ is complete
  store_rows<T::QTile, T::kHeadDim, T::kVec, T::kThreads>(
      head_rows(arrays.dq_g, params.dq, coords.batch, coords.head, coords.first_row), params.dq.seq, smem.q, rows,
      params.accumulate);
}

// dQ of the query rows of one CTA. `q_offset()` is the key position of query 0, `scratch_batch` is the sequence's
// number in scratch memory.
template <typename Offset>
__device__ __forceinline__ void add_up_dq(const BackwardParams& params, const Arrays& arrays,
                                          const TileCoordinates& coords, const KeyWindow& window, Offset q_offset,
                                          int scratch_batch) {
  const ScaleArrays& scales = arrays.options.scales;
  const GradientScale scale = scales.of_head(params, coords.batch, coords.head);
  scales.set_aside(scale);
  const Cta cta = {dynamic_shared<Smem>(), params, window,        arrays.options, q_offset(),
                   arrays.statistics_g,    coords, scratch_batch, scale};
  if (warp_index() < Traits::kSlices) {
    run<DoutWarp>(cta, arrays);
  } else {
    run<QueryWarp>(cta, arrays);
  }
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_backward_dq_wide)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, const DTYPE* dout_g,
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
