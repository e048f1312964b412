// The loop of the forward over int8 keys, for any source of keys. forward.cu documents what is computed and how.
#pragma once

#if !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || !defined(TILE_K) || \
    !defined(STEPS) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES) || !defined(L2_AHEAD)
#error \
    "HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, STEPS, VEC, MIN_CTAS, SHARED_BYTES, L2_AHEAD come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(MODIFIED)
#error "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS, MODIFIED come from a launch-configuration table"
#endif
#include "../../common/row_codes.cuh"
#include "../block_key_loop.cuh"
#include "../modifiers.cuh"
#include "../tensor_core/epilogue.cuh"
#include "../tensor_core/output_sums.cuh"
#include "../tensor_core/products.cuh"
#include "../tensor_core/resident_rows.cuh"
#include "../tensor_core/score_items.cuh"
#include "../tensor_core/softmax.cuh"
#include "key_loader.cuh"

// An int32 sum that begins at these bits is, read as a float, 1.5 * 2^23 + the sum: |sum| <= 127^2 * 256 < 2^22.
constexpr int kSumBits = 0x4b400000;
constexpr float kSumBias = 0x1.8p23f;

struct Traits {
  using Scalar = float16;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kTileQ = WARPS * kWarpRows;
  static constexpr int kSteps = div_up(kHeadDim, 16);     // k16 steps of Q K^T
  static constexpr int kOutTiles = div_up(kHeadDimV, 8);  // n8 tiles of the output
  static constexpr int kKeyTiles = kTileK / 8;            // k8 steps of P V
  static constexpr int kStepTiles = kKeyTiles / STEPS;    // n8 tiles of the scores that are computed together

  using QTile = SwizzledTile<kTileQ, 2 * kSteps>;
  using KTile = SwizzledTile<kTileK, kSteps>;  // chunks of 16 codes
  using VTile = SwizzledTile<kTileK, kOutTiles>;
  using OutTile = SwizzledTile<kTileQ, kOutTiles>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, false, Modifiers>;
  using Pass = ScorePass<Options, BIAS_VEC, MASK_VEC>;
  using Tile = ScoreTile<kMTiles, kStepTiles, Along::kN8>;
  using Items = ForwardItems<Pass, Tile>;
  // Two codes are an item of 16 bits. Keys start at multiples of gcd(kHeadDim, 16) bytes.
  static constexpr int kCodesVec = kHeadDim % kChunkBytes == 0 ? kChunkItems : 1;
  using KTileLoader = TileLoader<KTile, kHeadDim / 2, kCodesVec, kThreads, Tile>;
  // Where rows are shared by twice as many lanes, tiles that are no multiple of 16 rows have no idle pass.
  static constexpr int kVLanes = kTileK % 16 != 0 && kOutTiles == 16 ? 16 : 0;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kThreads, Tile, 0, kVLanes>;
  using OutputSums = ::OutputSums<ACCUMULATOR, kTileK, STEPS>;
  using Softmax = ::Softmax<kMTiles, kOutTiles, Scalar, OutputSums::Range<Scalar>>;

  static constexpr bool kSinks = kGiven<SINKS>;
  static constexpr bool kDropout = false;
  static constexpr bool kPass = Pass::kNeededInFull;

  static_assert(kHeadDim >= 2 && kHeadDim <= 256 && kHeadDim % 2 == 0, "head dims of q and k are even, up to 256");
  static_assert(kHeadDimV >= 1 && kHeadDimV <= 256, "head dims of v are 1 to 256");
  static_assert(kKeyTiles % STEPS == 0, "equal steps");
  static_assert(kTileK % 8 == 0 && kTileK <= kThreads, "whole n8 tiles, and a thread for the scale of each key");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
  static_assert(!Modifiers::kBlocks, "the loop has no lists of tiles");
};

// What the loop keeps in shared memory.
struct LoopTiles {
  KeyTiles<Traits::KTile, Traits::VTile> keys;
  alignas(128) float scales[2][Traits::kTileK];
  float centre_products[Traits::kTileQ];  // q . centre of each row
};

union Smem {
  LoopTiles loop;
  alignas(128) unsigned char q[Traits::QTile::kBytes];
  alignas(128) unsigned char out[Traits::OutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2];  // A fragments of codes: rows 0-7 and 8-15
  float scale[Traits::kMTiles][2];               // of the codes of a row
  Traits::Softmax softmax;
  int first_row;  // of the sequence
};

// Values that are the same for all threads of the CTA.
struct Cta {
  FragmentAddress<Traits::KTile> k_fragment;
  FragmentAddress<Traits::VTile> v_fragment;
  const AttentionParams& params;
  const KeyWindow& window;
  const Traits::Pass& pass;
  uint32 centre_products_s;  // of the thread's first row
};

// Integer sums of a step, which begin at kSumBits.
using Sums = int[Traits::kStepTiles][Traits::kMTiles][4];

// Chunks of a query row; those beyond the columns are zeros.
struct QueryChunks {
  __device__ __forceinline__ uint4 operator()(const void* chunk_g, int /*item*/, int chunk) const {
    if (chunk * kChunkItems >= Traits::kHeadDim) return make_uint4(0, 0, 0, 0);
    return load_chunk<Traits::kHeadDim, Traits::kVec>(chunk_g, chunk);
  }
};

// Four neighbouring items of a query row, as the columns of a k16 step lie in the lanes.
__device__ __forceinline__ void load_query_items(float (&x)[4], uint32 q_s, int row, int step) {
  const int t = lane_index() % 4;
  float words[2];
  ld_shared(words, q_s + Traits::QTile::offset(row, 2 * step + t / 2) + t % 2 * 8);
  const float2 low = unpack_halves(__float_as_uint(words[0])), high = unpack_halves(__float_as_uint(words[1]));
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// The codes of a warp's query rows, from the tile in shared memory, and their products with the centre.
__device__ __forceinline__ void quantise_queries(Warp& warp, float (&centre_products)[Traits::kMTiles][2], uint32 q_s,
                                                 const float* centre_g) {
  const int first_row = warp_index() * Traits::kWarpRows + lane_index() / 4;
  uint32 most[Traits::kMTiles][2] = {};
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) centre_products[i][0] = centre_products[i][1] = 0.f;
#pragma unroll 2
  for (int step = 0; step < Traits::kSteps; step++) {
    float centre[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int column = step * 16 + lane_index() % 4 * 4 + e;
      centre[e] = column < Traits::kHeadDim ? centre_g[column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float x[4];
        load_query_items(x, q_s, first_row + 16 * i + 8 * half, step);
        most[i][half] = max_bits(most[i][half], x);
#pragma unroll
        for (int e = 0; e < 4; e++) centre_products[i][half] = __fmaf_rn(x[e], centre[e], centre_products[i][half]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      centre_products[i][half] = warp_reduce<Sum, 4>(centre_products[i][half]);
      const RowCodes codes = RowCodes::of<false>(warp_reduce<MaxBits, 4>(most[i][half]));
      warp.scale[i][half] = codes.scale;
#pragma unroll
      for (int step = 0; step < Traits::kSteps; step++) {
        float x[4];
        load_query_items(x, q_s, first_row + 16 * i + 8 * half, step);
        warp.q[i][step][half] = codes.word(x);
      }
    }
  }
}

// The sums of Q K^T for 8 keys, from a group of chunks on.
template <int kGroup = 0>
__device__ __forceinline__ void add_sums(int (&sums)[Traits::kMTiles][4], const Warp& warp, const Cta& cta,
                                         uint32 rows_s) {
  constexpr int kCount = chunks_in_group(Traits::kSteps, kGroup);
  uint32 b[matrices_loaded(kCount)];
  ldmatrix(b, rows_s + cta.k_fragment.of_group(kGroup));
#pragma unroll
  for (int step = 0; step < kCount; step++) {
    const int at = kGroup * kGroupChunks + step;
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
      if (at == 0) {
        mma_m8n8k16_s8_pair(sums[i], warp.q[i][at], b[step], kSumBits);
      } else {
        mma_m8n8k16_s8_pair(sums[i], warp.q[i][at], b[step]);
      }
    }
  }
  if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_sums<kGroup + 1>(sums, warp, cta, rows_s);
}

// The scales of a thread's keys of a step.
using KeyScales = float[Traits::kStepTiles][2];

__device__ __forceinline__ void load_scales(KeyScales& scales, uint32 scales_s) {
#pragma unroll
  for (int n = 0; n < Traits::kStepTiles; n++) {
    ld_shared(scales[n], scales_s + (n * 8 + lane_index() % 4 * 2) * static_cast<int>(sizeof(float)));
  }
}

// body(n, i, half, x, y) for the two scores of neighbouring keys, times the scale of the key.
template <typename Body>
__device__ __forceinline__ void for_each_scaled(const Sums& sums, const KeyScales& key_scales, Body body) {
#pragma unroll
  for (int n = 0; n < Traits::kStepTiles; n++) {
    const float (&scales)[2] = key_scales[n];
    const float biases[] = {-kSumBias * scales[0], -kSumBias * scales[1]};
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int* pair = &sums[n][i][2 * half];
        body(n, i, half, __fmaf_rn(__int_as_float(pair[0]), scales[0], biases[0]),
             __fmaf_rn(__int_as_float(pair[1]), scales[1], biases[1]));
      }
    }
  }
}

// q . centre of a thread's rows.
__device__ __forceinline__ float centre_product(const Cta& cta, int i, int half) {
  float product[1];
  ld_shared(product, cta.centre_products_s + (16 * i + 8 * half) * static_cast<int>(sizeof(float)));
  return product[0];
}

// Sums to products of q and k: of a call with options all of it, otherwise without the centre's part, which the
// softmax does not see and the epilogue adds.
__device__ __forceinline__ void to_products(Scores<Traits::Tile>& scores, const Sums& sums, const Warp& warp,
                                            const Cta& cta, const KeyScales& scales) {
  float of_centre[Traits::kMTiles][2];
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) of_centre[i][half] = Traits::kPass ? centre_product(cta, i, half) : 0.f;
  }
  for_each_scaled(sums, scales, [&](int n, int i, int half, float x, float y) {
    scores.s[n][i][2 * half] = __fmaf_rn(x, warp.scale[i][half], of_centre[i][half]);
    scores.s[n][i][2 * half + 1] = __fmaf_rn(y, warp.scale[i][half], of_centre[i][half]);
  });
}

// P = 2^(scale_log2 * product - m) straight from the sums, as Softmax::exponentiate has it from scores.
__device__ __forceinline__ void exponentiate_sums(Traits::Tile::Packed& p, float (&sum)[Traits::kMTiles][2],
                                                  const Sums& sums, const Warp& warp, const Cta& cta,
                                                  const KeyScales& scales) {
  float scale_log2[Traits::kMTiles][2];
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      scale_log2[i][half] = warp.scale[i][half] * cta.params.scale_log2;
      sum[i][half] = 0.f;
    }
  }
  for_each_scaled(sums, scales, [&](int n, int i, int half, float x, float y) {
    x = ex2_approx(__fmaf_rn(x, scale_log2[i][half], -warp.softmax.m[i][half]));
    y = ex2_approx(__fmaf_rn(y, scale_log2[i][half], -warp.softmax.m[i][half]));
    sum[i][half] += x;
    sum[i][half] += y;
    p[n][i][half] = Traits::Softmax::Range::pack(x, y);
  });
}

// Sums of a step to packed probabilities; m and l are kept right, and the P of earlier steps of the tile. `whole`: the
// window leaves all scores.
template <bool kMasked, int kStep>
__device__ __forceinline__ void softmax_step(Traits::Tile::Packed (&steps)[STEPS], const Sums& sums, Warp& warp,
                                             const Traits::Items& items, const Cta& cta, int first_key, bool whole,
                                             const KeyScales& scales) {
  Traits::Tile::Packed& p = steps[kStep];
  const auto shrink_earlier = [&](int i, int half, float shrink) {
#pragma unroll
    for (int earlier = 0; earlier < kStep; earlier++) {
#pragma unroll
      for (int n = 0; n < Traits::kStepTiles; n++) {
        const float2 both = unpack_halves(steps[earlier][n][i][half]);
        steps[earlier][n][i][half] = pack_halves(both.x * shrink, both.y * shrink);
      }
    }
  };
  constexpr bool kScores = kMasked || Traits::kPass;
  float sum[Traits::kMTiles][2];
  Scores<Traits::Tile> scores;
  if (kScores) {
    to_products(scores, sums, warp, cta, scales);
    cta.pass.template apply<kMasked>(scores, warp.first_row, first_key, true, items);
  }
  if (kMasked) {
    if (!whole) scores.mask([&](int row) { return cta.window.of_row(warp.first_row + row); }, first_key);
    warp.softmax.raise(scores.s, shrink_earlier);
  }
  if (kScores) {
    warp.softmax.exponentiate(p, sum, scores.s, kLog2E);
  } else {
    exponentiate_sums(p, sum, sums, warp, cta, scales);
  }
  if (!kMasked && warp.softmax.overflows(sum)) {  // rare: a score rose far above the stale maximum
    if (!kScores) {
      to_products(scores, sums, warp, cta, scales);
      cta.pass.template apply<false>(scores, warp.first_row, first_key, false, items);
    }
    warp.softmax.raise(scores.s, shrink_earlier);
    warp.softmax.exponentiate(p, sum, scores.s, kLog2E);
  }
  warp.softmax.add(sum);
}

// Where a tile lies in shared memory.
struct TileAddress {
  uint32 k_s, v_s, scales_s;
};

// P of a tile, step by step, then the products of all of it with V. `store_k` comes after the last product with the
// tile's keys, `fetch_v` before those with its values.
template <bool kMasked, int kStep = 0, typename StoreK, typename FetchV>
__device__ __forceinline__ void attend_to_tile(Traits::Tile::Packed (&p)[STEPS], Warp& warp, const Cta& cta,
                                               const TileAddress& at, int first_key, bool active, bool whole,
                                               const StoreK& store_k, const FetchV& fetch_v) {
  constexpr int kFirst = kStep * Traits::kStepTiles * 8;
  Traits::Items items;
  Sums sums;
  if (active) {
#pragma unroll
    for (int n = 0; n < Traits::kStepTiles; n++) {
      add_sums(sums[n], warp, cta, at.k_s + (kFirst + n * 8) * Traits::KTile::kRowBytes);
    }
  }
  KeyScales scales;
  if (active) load_scales(scales, at.scales_s + kFirst * static_cast<int>(sizeof(float)));
  if constexpr (kStep + 1 < STEPS) {
    if (active) softmax_step<kMasked, kStep>(p, sums, warp, items, cta, first_key + kFirst, whole, scales);
    attend_to_tile<kMasked, kStep + 1>(p, warp, cta, at, first_key, active, whole, store_k, fetch_v);
  } else {
    store_k();
    const auto soften = [&] {
      softmax_step<kMasked, kStep>(p, sums, warp, items, cta, first_key + kFirst, whole, scales);
    };
    const auto add = [&] { Traits::OutputSums::add<Traits::Scalar>(warp.softmax.acc, p, at.v_s, cta.v_fragment); };
    if constexpr (STEPS > 1) {  // otherwise, as below, 56 bytes spill at head dim 128
      if (active) soften();
      fetch_v();
      if (active) add();
    } else if (active) {
      soften();
      fetch_v();
      add();
    } else {
      fetch_v();
    }
  }
}

// The first tile, all the way.
template <typename Loader>
__device__ __forceinline__ void bring(const Loader& loader, const typename Loader::Rows& from, int keys, int half) {
  typename Loader::Quads quads;
  float scale;
  loader.template fetch_k<true>(quads, scale, from, keys);
  loader.store_k(quads, scale, loader.k_s(half), loader.scales_s(half));
  loader.template fetch_v<true>(quads, from, keys);
  loader.store_v(quads, loader.v_s(half));
}

// One key tile, from one half of the buffers, while the next one is brought to the other half. V is loaded after the
// softmax: loaded before it, as tensor_core/forward.cuh does, its loads wait in the queue of the shared-memory loads
// of K, and registers are short.
template <bool kMasked, typename Loader>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, const Loader& loader, int tile, int half,
                                         bool more, typename Loader::Rows& next, int next_keys, int after_next) {
  const int first_key = tile * Traits::kTileK;
  const uint32 k_s = loader.k_s(half), v_s = loader.v_s(half), scales_s = loader.scales_s(half);
  const uint32 next_k_s = loader.k_s(half ^ 1), next_v_s = loader.v_s(half ^ 1);

  // In a masked tile a warp may see nothing, or everything.
  Seen seen;
  if (kMasked) {
    seen = seen_of<Traits::kWarpRows, Traits::kTileK>(cta.window, warp.first_row, first_key, kFull);
  }

  typename Loader::Quads quads;
  float scale;
  if (more) loader.template fetch_k<kMasked>(quads, scale, next, next_keys);
  const auto store_k = [&] {
    if (more) loader.store_k(quads, scale, next_k_s, loader.scales_s(half ^ 1));
  };
  const auto fetch_v = [&] {
    __syncwarp();  // no buffer: ptxas would otherwise load V sooner
    if (more) loader.template fetch_v<kMasked>(quads, next, next_keys);
    loader.look_ahead(next, after_next);
  };
  Traits::Tile::Packed p[STEPS];
  attend_to_tile<kMasked>(p, warp, cta, {k_s, v_s, scales_s}, first_key, seen.active, seen.whole, store_k, fetch_v);
  if (more) loader.store_v(quads, next_v_s);
  __syncthreads();  // K, its scales and V: this half has been read, the other one written
}

// Arrays besides keys.
struct Arrays {
  const float16* q_g;
  const float* centre_g;  // of the head
  float16* out_g;
  float* lse_g;
  const void *bias_g, *mask_g, *slopes_g, *sinks_g;
  Modifiers modifiers;
};

// The query rows of one CTA; `make_loader` makes the loader of a head.
template <typename MakeLoader>
__device__ __forceinline__ void attend(const AttentionParams& params, const Arrays& arrays,
                                       const TileCoordinates& coords, const KeyWindow& window, int64 q_offset,
                                       const MakeLoader& make_loader) {
  Smem& smem = dynamic_shared<Smem>();

  // Phase 1: the keys of the loop.
  const int rows = min(Traits::kTileQ, coords.sq - coords.first_row);
  const KeyLoop<Traits::kTileK> loop(window, coords.first_row, rows);
  const Traits::Pass pass(params, arrays.bias_g, arrays.mask_g, arrays.slopes_g, coords, q_offset, arrays.modifiers);

  // Phase 2: Q, through shared memory into codes in registers, and its products with the centre.
  Warp warp;
  warp.first_row = coords.first_row + warp_index() * Traits::kWarpRows;
  load_rows<Traits::QTile, Traits::kHeadDim, Traits::kVec, Traits::kThreads, RowsInOrder>(
      shared_address(smem.q), query_row(arrays.q_g, params.q, coords, coords.first_row), params.q.seq, rows,
      QueryChunks());
  __syncthreads();  // q: written
  float centre_products[Traits::kMTiles][2];
  quantise_queries(warp, centre_products, shared_address(smem.q), arrays.centre_g);
  warp.softmax.clear();
  const uint32 centre_products_s =
      shared_address(&smem.loop.centre_products[warp_index() * Traits::kWarpRows + lane_index() / 4]);
  __syncthreads();  // q: read; the loop's tiles take its place
  if (lane_index() % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        st_shared_u32(centre_products_s + (16 * i + 8 * half) * sizeof(float),
                      __float_as_uint(centre_products[i][half]));
      }
    }
  }

  // Phase 3: the loop over the keys, masked tiles first.
  const Cta cta = {{}, {}, params, window, pass, centre_products_s};
  auto loader = make_loader(smem.loop);
  int tile = loop.first, left = loop.tiles();
  const int full = left - loop.masked;
  auto next = loader.rows(tile);
  if (left > 0) bring(loader, next, window.keys - tile * Traits::kTileK, left & 1);
  loader.look_ahead(next, loop.after(tile));
  __syncthreads();  // K, its scales, V and the centre's products: written
#pragma unroll 1
  for (; left > full; left--) {
    const int next_tile = loop.after(tile);
    loader.move_to(next, next_tile);
    key_tile<true>(warp, cta, loader, tile, left & 1, left > 1, next, window.keys - next_tile * Traits::kTileK,
                   loop.after(next_tile));
    tile = next_tile;
  }
  warp.softmax.renew();
  loader.renew();
#pragma unroll 1
  for (; left > 0; left--) {
    loader.move_on(next);
    loader.template bring_to_l2<L2_AHEAD>(next, left);
    key_tile<false>(warp, cta, loader, tile, left & 1, left > 1, next, Traits::kTileK, tile + 2);
    tile++;
  }

  // Phase 4: add the centre's part of the scores, which the softmax did not need, normalise, and store through shared
  // memory.
  if (!Traits::kPass) {
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float& m = warp.softmax.m[i][half];
        if (m != kNoMaximum) m = __fmaf_rn(centre_product(cta, i, half), params.scale_log2, m);
      }
    }
  }
  __syncthreads();  // the centre's products: read; the output takes the place of the loop's tiles
  const OutputRows<Traits> output = {params, coords, warp.first_row};
  output.finish(warp.softmax, shared_address(smem.out), sink_log2<SINKS>(arrays.sinks_g, params, coords.head),
                arrays.lse_g);
  __syncwarp();  // out: each warp reads what it wrote itself
  output.store(smem.out, arrays.out_g);
}
