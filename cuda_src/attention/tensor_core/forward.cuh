// The loop of the tensor-core forward, for any loader of keys. forward.cu documents what is computed and how.
#pragma once

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || \
    !defined(TILE_K) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES) || !defined(L2_AHEAD)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, VEC, MIN_CTAS, SHARED_BYTES, L2_AHEAD come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(DROPOUT) || !defined(MODIFIED)
#error \
    "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS, DROPOUT, MODIFIED come from a launch-configuration table"
#endif
#include "../block_key_loop.cuh"
#include "../modifiers.cuh"
#include "dropout.cuh"
#include "epilogue.cuh"
#include "key_loader.cuh"
#include "output_sums.cuh"
#include "products.cuh"
#include "resident_rows.cuh"
#include "score_items.cuh"
#include "softmax.cuh"

struct Traits {
  using Scalar = DTYPE;  // bfloat16 from sm_80 on
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kTileQ = WARPS * kWarpRows;
  static constexpr int kSteps = div_up(kHeadDim, 8);      // k8 steps of Q K^T
  static constexpr int kOutTiles = div_up(kHeadDimV, 8);  // n8 tiles of the output
  static constexpr int kKeyTiles = kTileK / 8;            // n8 tiles of the scores, k8 steps of P V

  using QTile = SwizzledTile<kTileQ, kSteps>;
  using KTile = SwizzledTile<kTileK, kSteps>;
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
  using Sums = OutputSums<ACCUMULATOR, kTileK>;
  using Softmax = ::Softmax<kMTiles, kOutTiles, Scalar, typename Sums::template Range<Scalar>>;

  static constexpr bool kSinks = kGiven<SINKS>;
  static constexpr bool kDropout = DROPOUT;
  static constexpr bool kPass = Pass::kNeededInFull;

  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kTileK % 16 == 0, "dropout draws for 16 keys at least");
  static_assert(kThreads <= 1024, "a CTA has at most 1,024 threads");
};

union Smem {
  KeyTiles<Traits::KTile, Traits::VTile> keys;
  alignas(128) unsigned char q[Traits::QTile::kBytes];
  alignas(128) unsigned char out[Traits::OutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2];  // A fragments
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
  TileCoordinates coords;
};

// S += Q K^T over the columns from this group on, group by group.
template <int kGroup = 0>
__device__ __forceinline__ void add_scores(Scores<Traits::Tile>& scores, const Warp& warp, const Cta& cta, uint32 k_s) {
#pragma unroll
  for (int n = 0; n < Traits::kKeyTiles; n++) {
    add_product_nt<kGroup, Traits::Scalar>(scores.s[n], warp.q, k_s + n * 8 * Traits::KTile::kRowBytes, cta.k_fragment);
  }
  if constexpr (kGroup + 1 < chunk_groups(Traits::kSteps)) add_scores<kGroup + 1>(scores, warp, cta, k_s);
}

// Scores to packed probabilities; m and l are kept right. Of a partial tile a block mask leaves the scores in `bits`.
template <bool kMasked>
__device__ __forceinline__ void softmax_tile(Traits::Tile::Packed& p, Scores<Traits::Tile>& scores, Warp& warp,
                                             const Traits::Items& items, const Cta& cta, int first_key,
                                             const Seen& seen, const SeenScores<Traits::Tile>& bits) {
  constexpr bool kPass = kMasked || Traits::kPass;
  float sum[Traits::kMTiles][2];
  if (kPass) cta.pass.template apply<kMasked>(scores, warp.first_row, first_key, !Modifiers::kBlocks, items);
  if (Modifiers::kBlocks && kMasked && seen.partial) cta.pass.hide_unseen(scores, bits);
  if (kMasked && !seen.whole) scores.mask([&](int row) { return cta.window.of_row(warp.first_row + row); }, first_key);
  if (kMasked) {
    warp.softmax.raise(scores.s);
    warp.softmax.exponentiate(p, sum, scores.s, kLog2E);
  } else {
    warp.softmax.exponentiate(p, sum, scores.s, kPass ? kLog2E : cta.params.scale_log2);
    if (warp.softmax.overflows(sum)) {  // rare: a score rose far above the stale maximum
      if (!kPass) cta.pass.template apply<false>(scores, warp.first_row, first_key, false, items);
      warp.softmax.raise(scores.s);
      warp.softmax.exponentiate(p, sum, scores.s, kLog2E);
    }
  }
  warp.softmax.add(sum);
}

// One key tile, from one half of the K and V buffers, while the next one is brought to the other half. The loader
// looks up the tile after the next one.
template <bool kMasked, typename Loader, typename Tile>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, const Loader& loader, const Tile& tile, int half,
                                         bool more, typename Loader::Rows& next, int next_keys, int after_next) {
  const int first_key = tile * Traits::kTileK;
  const uint32 k_s = loader.k_s(half), v_s = loader.v_s(half);
  // Formed here: where there may be no next tile, each use would form its own.
  const uint32 next_k_s = loader.k_s(half ^ 1), next_v_s = loader.v_s(half ^ 1);

  // In a masked tile a warp may see nothing, or everything.
  Seen seen;
  if (kMasked) {
    seen =
        seen_of<Traits::kWarpRows, Traits::kTileK>(cta.window, warp.first_row, first_key, state_of(tile, warp_index()));
  }

  Traits::Items items;
  Scores<Traits::Tile> scores;
  typename Loader::Quads quads;
  if (more) loader.template fetch_k<kMasked>(quads, next, next_keys);
  typename Loader::Entry ahead;
  if (Loader::kLookUp == LookUp::kFirst) ahead = loader.look_up(after_next);
  // No buffer: ptxas would otherwise sink K's loads. (With 32 rows a warp it mostly does not, and this made it place
  // V's worse.)
  if (Traits::kMTiles == 1) __syncwarp();
  SeenScores<Traits::Tile> bits = {};
  if (seen.active) {
    if (Modifiers::kBlocks && seen.partial) cta.pass.ask(bits, scores, warp.first_row, first_key);
    if (!kMasked) items.template load<false>(cta.pass, warp.first_row, first_key);
    clear(scores.s);
    add_scores(scores, warp, cta, k_s);
  }
  if (more) {
    loader.store_k(quads, next_k_s);
    __syncwarp();  // no buffer: ptxas would otherwise load V first, and the stores of K then wait for V
    loader.template fetch_v<kMasked>(quads, next, next_keys);
    if (Loader::kLookUp == LookUp::kWithV) ahead = loader.look_up(after_next);
  }
  if (Loader::kLookUp == LookUp::kAfterV) ahead = loader.look_up(after_next);
  if (seen.active) {
    if (kMasked) items.template load<true>(cta.pass, warp.first_row, first_key);
    Traits::Tile::Packed packed[1];
    Traits::Tile::Packed& p = packed[0];
    softmax_tile<kMasked>(p, scores, warp, items, cta, first_key, seen, bits);
    if constexpr (DROPOUT) drop<Traits::Tile>(p, cta.params.scores, cta.coords, warp.first_row, first_key);
    Traits::Sums::add<Traits::Scalar>(warp.softmax.acc, packed, v_s, cta.v_fragment);
  }
  if (more) loader.store_v(quads, next_v_s);
  loader.keep(next, ahead);
  __syncthreads();  // K and V: this half has been read, the other one written
}

using Arrays = ForwardArrays<Traits::Scalar>;

// The query rows of one CTA; `keys` makes the loader of a head, `chunks` the chunks of a query row, `split` selects
// which keys are this CTA's.
template <typename Keys, typename Chunks = StoredChunks<Traits::kHeadDim, Traits::kVec>, typename Split = AllKeys>
__device__ __forceinline__ void attend(const AttentionParams& params, const Arrays& arrays,
                                       const TileCoordinates& coords, const KeyWindow& window, int64 q_offset,
                                       const Keys& keys, const Chunks& chunks = {}, const Split& split = {}) {
  Smem& smem = dynamic_shared<Smem>();

  // Phase 1: the keys of the loop.
  const int rows = min(Traits::kTileQ, coords.sq - coords.first_row);
  const auto loop =
      split.of(loop_over_keys<Traits::kTileQ, Traits::kTileK>(window, coords, rows, arrays.modifiers.blocks));
  if (!Split::kAll && loop.tiles() == 0) return;
  const Traits::Pass pass(params, arrays.bias_g, arrays.mask_g, arrays.slopes_g, coords, q_offset, arrays.modifiers);

  // Phase 2: Q, through shared memory into registers.
  Warp warp;
  warp.first_row = coords.first_row + warp_index() * Traits::kWarpRows;
  load_rows<Traits::QTile, Traits::kHeadDim, Traits::kVec, Traits::kThreads, RowsInOrder>(
      shared_address(smem.q), query_row(arrays.q_g, params.q, coords, coords.first_row), params.q.seq, rows, chunks);
  __syncthreads();  // q: written
  load_a_fragments<Traits::QTile>(warp.q, shared_address(smem.q), warp_index() * Traits::kWarpRows);
  warp.softmax.clear();
  __syncthreads();  // q: read; K and V take its place

  // Phase 3: the loop over the keys, masked tiles first.
  const Cta cta = {{}, {}, params, window, pass, coords};
  auto loader = keys.template loader<Traits>(coords, window, rows, smem.keys);
  auto tile = loop.first, next_tile = loop.after(tile);
  int left = loop.tiles();
  const int full = left - loop.masked;
  auto next = loader.rows(tile);
  if (left > 0) loader.bring(next, window.keys - tile * Traits::kTileK, left & 1, next_tile);
  __syncthreads();  // K and V: the first tile has been written
#pragma unroll 1
  for (; left > full; left--) {
    if (!Modifiers::kBlocks) next_tile = loop.after(tile);  // carried along, it would take a register
    const auto after_next = loop.after(next_tile);
    loader.move_to(next, next_tile);
    key_tile<true>(warp, cta, loader, tile, left & 1, left > 1, next, window.keys - next_tile * Traits::kTileK,
                   after_next);
    tile = next_tile;
    next_tile = after_next;
  }
  warp.softmax.renew();
  loader.renew();
  if constexpr (Modifiers::kBlocks) loader.move_to_listed(next, next_tile);
#pragma unroll 1
  for (; left > 0; left--) {
    if constexpr (Modifiers::kBlocks) {
      const auto after_next = loop.whole_after(next_tile);
      key_tile<false>(warp, cta, loader, tile, left & 1, left > 1, next, Traits::kTileK, after_next);
      tile = next_tile;
      next_tile = after_next;
      loader.move_to_listed(next, next_tile);
    } else {
      loader.move_on(next);
      loader.template bring_to_l2<L2_AHEAD>(next, left);
      key_tile<false>(warp, cta, loader, tile, left & 1, left > 1, next, Traits::kTileK, tile + 2);
      tile++;
    }
  }

  // Phase 4: normalise, and store through shared memory: fragments hold 4 bytes of a row each. Or store sums.
  const OutputRows<Traits> output = {params, coords, warp.first_row};
  if constexpr (Split::kAll) {
    output.finish(warp.softmax, shared_address(smem.out), sink_log2<SINKS>(arrays.sinks_g, params, coords.head),
                  arrays.lse_g);
    __syncwarp();  // out: each warp reads what it wrote itself
    output.store(smem.out, arrays.out_g);
  } else {
    output.store_sums(warp.softmax, split);
  }
}
