// The loop of the forward of sm_80 and later. forward.cu documents what is computed and how.
#pragma once

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || \
    !defined(TILE_K) || !defined(STEPS) || !defined(Q_SHARED) || !defined(DEFERRED) || !defined(VEC) ||      \
    !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, STEPS, Q_SHARED, DEFERRED, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(DROPOUT) || !defined(MODIFIED)
#error \
    "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS, DROPOUT, MODIFIED come from a launch-configuration table"
#endif
#include "../block_key_loop.cuh"
#include "../modifiers.cuh"
#include "../tensor_core/dropout.cuh"
#include "../tensor_core/epilogue.cuh"
#include "../tensor_core/products.cuh"
#include "../tensor_core/resident_rows.cuh"
#include "../tensor_core/score_items.cuh"
#include "key_loader.cuh"
#include "softmax.cuh"

struct Traits {
  using Scalar = DTYPE;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;          // keys of a copy
  static constexpr int kStepK = TILE_K / STEPS;  // and of a softmax
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kTileQ = WARPS * kWarpRows;
  static constexpr int kChunks = div_up(kHeadDim, kChunkItems);
  static constexpr int kOutTiles = div_up(kHeadDimV, 8);  // n8 tiles of the output
  static constexpr int kKeyTiles = kStepK / 8;            // n8 tiles of the scores

  using QTile = SwizzledTile<kTileQ, kChunks>;
  using KTile = SwizzledTile<kTileK, kChunks>;
  using VTile = SwizzledTile<kTileK, kOutTiles>;
  using OutTile = SwizzledTile<kTileQ, kOutTiles>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options, BIAS_VEC, MASK_VEC>;
  // Arrays that are read four keys at a time want threads that hold four neighbouring keys.
  static constexpr int kRun = BIAS_VEC == 4 || MASK_VEC == 4 ? 4 : 1;
  using Tile = ScoreTile<kMTiles, kKeyTiles, Along::kN8, kRun>;
  using Items = ForwardItems<Pass, Tile>;
  using KTileLoader = TileLoader<KTile, kHeadDim, kVec, kThreads, Tile>;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kThreads, Tile>;
  using Loader = AsyncKeyLoader<KTileLoader, VTileLoader>;
  using Softmax = NativeSoftmax<Scalar, kMTiles, kOutTiles>;

  static constexpr bool kSinks = kGiven<SINKS>;
  static constexpr bool kDropout = DROPOUT;
  // Full tiles: whether scores are more than scaled products, and else whether anything hides some of them.
  static constexpr bool kPass = Options::kBeyondScale;
  static constexpr bool kHide = !kPass && Pass::kNeededInFull;
  static constexpr bool kQShared = Q_SHARED;
  // Where a row sees all keys of a tile, what is NaN in one score is in the whole row.
  static constexpr bool kHides = Options::kMask || Modifiers::kMask;
  // A score_mod is given whole scores.
  static constexpr bool kSlopes = kGiven<SLOPES>, kByKey = kSlopes && !Modifiers::kScore;
  static constexpr Check kCheck = DEFERRED ? Check::kAfter : Check::kBefore;

  static_assert(sizeof(Scalar) == 2, "float16 or bfloat16");
  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileK % STEPS == 0 && kStepK % 16 == 0, "mma.m16n8k16 takes P of 16 keys");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
};

// Q stays next to both stages, or it is in the place of the second one until its fragments are in registers. The output
// takes the place of Q.
constexpr int kRowsBytes =
    Traits::QTile::kBytes > Traits::OutTile::kBytes ? Traits::QTile::kBytes : Traits::OutTile::kBytes;
#if Q_SHARED
struct Smem {
  Traits::Loader::Stage first, second;
  alignas(128) unsigned char rows[kRowsBytes];
};
#else
struct Smem {
  Traits::Loader::Stage first;
  union {
    Traits::Loader::Stage second;
    alignas(128) unsigned char rows[kRowsBytes];
  };
};
#endif
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kChunks][2];  // A fragments, unless Q stays in shared memory
  uint32 q_s;                                     // where its rows of Q are
  Traits::Softmax softmax;
  int first_row;  // of the sequence
};

// Values that are the same for all threads of the CTA, and a lane's addresses within tiles.
struct Cta {
  SixteenRows<Traits::QTile> q_lane;
  SixteenRows<Traits::KTile> k_lane;
  SixteenRows<Traits::VTile> v_lane;
  const AttentionParams& params;
  const KeyWindow& window;
  const Traits::Pass& pass;
  TileCoordinates coords;
  float scale_log2;  // of products with Q, not negative
};

using TileScores = Scores<Traits::Tile>;

// S = Q K^T of the keys at k_s.
__device__ __forceinline__ void make_scores(TileScores& scores, const Warp& warp, const Cta& cta, uint32 k_s) {
  using Scalar = Traits::Scalar;
  using KTile = Traits::KTile;
  clear(scores.s);
#pragma unroll
  for (int pair = 0; pair < SixteenRows<KTile>::kPairs; pair++) {
    const uint32 pair_s = cta.k_lane.of_pair(k_s, pair);
    if constexpr (Traits::kQShared) {
      uint32 q[Traits::kMTiles][2][2];
      load_pair<Traits::QTile>(q, cta.q_lane.of_pair(warp.q_s, pair));
      add_pair_nt<Scalar, KTile>(scores.s, q, 0, pair_s);
    } else {
      add_pair_nt<Scalar, KTile>(scores.s, warp.q, 2 * pair, pair_s);
    }
  }
  if constexpr (SixteenRows<KTile>::kOdd) {
    const uint32 tail_s = cta.k_lane.of_tail(k_s);
    if constexpr (Traits::kQShared) {
      uint32 q[Traits::kMTiles][1][2];
      load_tail<Traits::QTile>(q, cta.q_lane.of_tail(warp.q_s));
      add_tail_nt<Scalar, KTile>(scores.s, q, 0, tail_s);
    } else {
      add_tail_nt<Scalar, KTile>(scores.s, warp.q, Traits::kChunks - 1, tail_s);
    }
  }
}

// O += P V of the keys at v_s.
__device__ __forceinline__ void add_output(Warp& warp, const Cta& cta, const Traits::Tile::Packed& p, uint32 v_s) {
#pragma unroll
  for (int n = 0; n < Traits::kKeyTiles; n += 2) {
    add_sixteen_nn<Traits::Scalar, Traits::VTile>(warp.softmax.acc, p[n], p[n + 1],
                                                  v_s + n * 8 * Traits::VTile::kRowBytes, cta.v_lane);
  }
}

// Dropout of P, where a call has it.
__device__ __forceinline__ void drop_of_call(Traits::Tile::Packed& p, const Warp& warp, const Cta& cta, int first_key) {
  if constexpr (DROPOUT) drop<Traits::Tile>(p, cta.params.scores, cta.coords, warp.first_row, first_key);
}

// On which side of all of the warp's queries the keys of a step are: 1 before them, -1 after them, 0 neither. Also 0
// for slopes of which 57 keys make a rounding that counts.
__device__ __forceinline__ float side_of(const Warp& warp, const Cta& cta, int first_key) {
  constexpr float kMostSlope = 1.f;
  const int64 distance = warp.first_row + cta.pass.q_offset - first_key;
  if (!(fabsf(cta.pass.rule.slope) <= kMostSlope)) return 0.f;
  return distance >= Traits::kStepK - 1 ? 1.f : distance <= 1 - Traits::kWarpRows ? -1.f : 0.f;
}

// What ALiBi subtracts from all of a thread's scores of a row: the penalty of the thread's first key.
template <Penalty kPenalty>
__device__ __forceinline__ auto row_shift(const Warp& warp, const Cta& cta, int first_key) {
  if constexpr (kPenalty == Penalty::kByKey) {
    using Tile = Traits::Tile;
    RowShift<Traits::kMTiles> shift;
    const int lane_row = Tile::row_of(0, 0, 0);
    const Distance distance(warp.first_row + lane_row + cta.pass.q_offset - (first_key + Tile::key_of(0, 0, 0)));
    const float slope_log2 = cta.pass.rule.slope * kLog2E;
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        shift.of[i][half] = -slope_log2 * fabsf(distance.plus(Tile::row_of(0, i, 2 * half) - lane_row, 0));
      }
    }
    return shift;
  } else {
    return NoShift();
  }
}

// The keys of one softmax, from products to P V. `side` is that of keys whose ALiBi is kByKey.
template <bool kMasked, Penalty kPenalty = Penalty::kOfDistance>
__device__ __forceinline__ void key_step(Warp& warp, const Cta& cta, uint32 k_s, uint32 v_s, int first_key,
                                         const Seen& seen, float side = 0.f) {
  constexpr bool kPass = kMasked || Traits::kPass;
  constexpr Capping kCapping = kMasked || Traits::kHides ? Capping::kEach : Capping::kFours;
  // Few tiles have ALiBi by distance.
  constexpr bool kOften = !kMasked && (!Traits::kByKey || kPenalty == Penalty::kByKey);
  constexpr bool kAfter = kOften && Traits::kCheck == Check::kAfter;
  const float scale = kPass ? kLog2E : cta.scale_log2;
  Traits::Items items;
  TileScores scores;
  SeenScores<Traits::Tile> bits = {};
  if (Modifiers::kBlocks && seen.partial) cta.pass.ask(bits, scores, warp.first_row, first_key);
  items.template load<kMasked>(cta.pass, warp.first_row, first_key);
  make_scores(scores, warp, cta, k_s);
  const auto pass = [&] {
    if constexpr (kPass) {
      cta.pass.template apply<kMasked, kPenalty, kCapping>(scores, warp.first_row, first_key, !Modifiers::kBlocks,
                                                           items, side * cta.pass.rule.slope);
    } else if constexpr (Traits::kHide) {
      cta.pass.template hide<kMasked>(scores, warp.first_row, first_key, !Modifiers::kBlocks, items);
    }
  };
  pass();
  if (Modifiers::kBlocks && kMasked && seen.partial) cta.pass.hide_unseen(scores, bits);
  if (kMasked && !seen.whole) {
    scores.mask([&](int row) { return cta.window.of_row(warp.first_row + row); }, first_key);
  }
  const auto shift = row_shift<kPenalty>(warp, cta, first_key);
  if (!kAfter) warp.softmax.raise(scores.s, scale, shift);
  Traits::Tile::Packed p;
  float sum[Traits::kMTiles][2];
  warp.softmax.template exponentiate<kAfter>(p, sum, scores.s, scale, shift);
  if (!kAfter) warp.softmax.add(sum);
  drop_of_call(p, warp, cta, first_key);
  add_output(warp, cta, p, v_s);
  if (kAfter) {
    if (__builtin_expect(warp.softmax.overflows(sum), false)) {  // a score rose far above the stale maximum
      items.template load<kMasked>(cta.pass, warp.first_row, first_key);
      make_scores(scores, warp, cta, k_s);
      pass();
      warp.softmax.take_back(p, scores.s, scale, shift);
      drop_of_call(p, warp, cta, first_key);
      add_output(warp, cta, p, v_s);
    } else {
      warp.softmax.add(sum);
    }
  }
}

// One key tile, from the stage at stage_s.
template <bool kMasked, typename Tile>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, uint32 stage_s, const Tile& tile) {
  const uint32 k_s = stage_s, v_s = Traits::Loader::v_s(stage_s);
#pragma unroll 1
  for (int step = 0; step < STEPS; step++) {
    const int keys = step * Traits::kStepK, first_key = tile * Traits::kTileK + keys;
    // In a masked tile a warp may see nothing, or everything.
    Seen seen;
    if (kMasked) {
      seen = seen_of<Traits::kWarpRows, Traits::kStepK>(cta.window, warp.first_row, first_key,
                                                        state_of(tile, warp_index()));
    }
    if (!seen.active) continue;
    const uint32 step_k_s = k_s + keys * Traits::KTile::kRowBytes, step_v_s = v_s + keys * Traits::VTile::kRowBytes;
    if constexpr (!kMasked && Traits::kByKey) {
      if (const float side = side_of(warp, cta, first_key)) {
        key_step<false, Penalty::kByKey>(warp, cta, step_k_s, step_v_s, first_key, seen, side);
        continue;
      }
    }
    key_step<kMasked>(warp, cta, step_k_s, step_v_s, first_key, seen);
  }
}

// Copy the query rows of the CTA; zeros from `valid_rows` on.
__device__ __forceinline__ void copy_queries(uint32 tile_s, const Traits::Scalar* rows_g, int64 row_stride,
                                             int valid_rows) {
  using QTile = Traits::QTile;
#pragma unroll 4
  for (int at = threadIdx.x; at < QTile::kRows * QTile::kChunks; at += Traits::kThreads) {
    const int row = at / QTile::kChunks, chunk = at % QTile::kChunks;
    const auto* chunk_g = reinterpret_cast<const char*>(rows_g + row * row_stride + chunk * kChunkItems);
    copy_chunk<Traits::kHeadDim, Traits::kVec, true>(tile_s + QTile::offset(row, chunk), chunk_g, chunk,
                                                     row < valid_rows);
  }
}

// For a negative scale: the largest score would be that of the least product.
__device__ __forceinline__ void negate_queries(uint32 tile_s) {
  constexpr uint32 kSigns = 0x80008000u;
#pragma unroll 1
  for (int at = threadIdx.x * kChunkBytes; at < Traits::QTile::kBytes; at += Traits::kThreads * kChunkBytes) {
    uint4 chunk = ld_shared_v4(tile_s + at);
    chunk.x ^= kSigns, chunk.y ^= kSigns, chunk.z ^= kSigns, chunk.w ^= kSigns;
    st_shared_v4(tile_s + at, chunk);
  }
}

using Arrays = ForwardArrays<Traits::Scalar>;

// The query rows of one CTA; `keys` makes the loader of a head, `split` selects which keys are this CTA's.
template <typename Keys, typename Split = AllKeys>
__device__ __forceinline__ void attend(const AttentionParams& params, const Arrays& arrays, const Keys& keys,
                                       const TileCoordinates& coords, const KeyWindow& window, int64 q_offset,
                                       const Split& split = {}) {
  Smem& smem = dynamic_shared<Smem>();
  const uint32 rows_s = shared_address(smem.rows);

  // Phase 1: the keys of the loop.
  const int rows = min(Traits::kTileQ, coords.sq - coords.first_row);
  const auto loop =
      split.of(loop_over_keys<Traits::kTileQ, Traits::kTileK>(window, coords, rows, arrays.modifiers.blocks));
  if (!Split::kAll && loop.tiles() == 0) return;
  Traits::Pass pass(params, arrays.bias_g, arrays.mask_g, arrays.slopes_g, coords, q_offset, arrays.modifiers);

  // Phase 2: Q and the first tile on their way; Q into registers, unless it stays where it is.
  const bool negated = !Traits::kPass && params.scale_log2 < 0.f;
  if (negated) pass.rule.scale = -pass.rule.scale;
  auto tile = loop.first, next_tile = loop.after(tile);
  int left = loop.tiles();
  const int full = left - loop.masked;
  auto loader = keys.template loader<Traits>(params, coords, window, rows);
  uint32 stage_s = shared_address(&smem.first), next_s = shared_address(&smem.second);
  const uint32 stages_s = stage_s + next_s;
  copy_queries(rows_s, query_row(arrays.q_g, params.q, coords, coords.first_row), params.q.seq, rows);
  if constexpr (Keys::kLooksUp) loader.look_up(tile);
  if (left > 0) loader.template copy<true>(stage_s, loader.rows(tile), window.keys - tile * Traits::kTileK);
  if constexpr (Keys::kLooksUp) loader.look_up(next_tile);
  cp_async_commit_group();
  Warp warp;
  warp.first_row = coords.first_row + warp_index() * Traits::kWarpRows;
  warp.q_s = rows_s + warp_index() * Traits::kWarpRows * Traits::QTile::kRowBytes;
  warp.softmax.clear();
  if (!Traits::kQShared || negated) {
    cp_async_wait_group<0>();
    __syncthreads();  // Q: written
    if (negated) {
      negate_queries(rows_s);
      __syncthreads();  // Q: negated
    }
    if constexpr (!Traits::kQShared) load_a_fragments<Traits::QTile>(warp.q, rows_s, warp_index() * Traits::kWarpRows);
  }

  // Phase 3: the loop over the keys, masked tiles first. 0 times a hidden score, which is -inf, would be NaN.
  constexpr float kLeast = 1.17549435e-38f;
  const float scale_log2 = Traits::kHide ? fmaxf(fabsf(params.scale_log2), kLeast) : fabsf(params.scale_log2);
  const Cta cta = {SixteenRows<Traits::QTile>::by_rows(),
                   SixteenRows<Traits::KTile>::by_chunks(),
                   SixteenRows<Traits::VTile>::by_rows(),
                   params,
                   window,
                   pass,
                   coords,
                   scale_log2};
#pragma unroll 1
  for (; left > full; left--) {
    cp_async_wait_group<0>();
    __syncthreads();  // this stage (and Q): written; the next one (and Q in its place): read
    if (left > 1) loader.template copy<true>(next_s, loader.rows(next_tile), window.keys - next_tile * Traits::kTileK);
    cp_async_commit_group();
    if constexpr (Keys::kLooksUp) loader.look_up(loop.after(next_tile));
    key_tile<true>(warp, cta, stage_s, tile);
    stage_s = next_s;
    next_s = stages_s - stage_s;
    tile = next_tile;
    next_tile = loop.after(next_tile);
  }
#pragma unroll 1
  for (; left > 0; left--) {
    cp_async_wait_group<0>();
    __syncthreads();  // this stage (and Q): written; the next one (and Q in its place): read
    next_tile = loop.whole_after(tile);
    if (left > 1) loader.template copy<false>(next_s, loader.rows(next_tile), Traits::kTileK);
    cp_async_commit_group();
    if constexpr (Keys::kLooksUp) loader.look_up(loop.whole_after(next_tile));
    key_tile<false>(warp, cta, stage_s, tile);
    stage_s = next_s;
    next_s = stages_s - stage_s;
    tile = next_tile;
  }

  // Phase 4: normalise, and store through shared memory: fragments hold 4 bytes of a row each. Or store sums.
  const OutputRows<Traits> output = {params, coords, warp.first_row};
  if constexpr (Split::kAll) {
    cp_async_wait_group<0>();
    __syncthreads();  // Q and the stages: read, and without keys written
    output.finish(warp.softmax, rows_s, sink_log2<SINKS>(arrays.sinks_g, params, coords.head), arrays.lse_g);
    __syncwarp();  // out: each warp reads what it wrote itself
    output.store(smem.rows, arrays.out_g);
  } else {
    output.store_sums(warp.softmax, split);
  }
}
