// The loop of the tensor-core forward for head dims of 257 to 512, for any loader of keys. forward.cu documents what is
// computed.
//
// 64 rows of wide heads take half of an SM's registers for the output and a quarter for Q, each item once: four warps
// share 32 rows (score_exchange.cuh), and a fragment of K or V that is read from shared memory feeds two products, as
// with smaller heads. A tile of keys has two phases:
//
//   scores   each warp multiplies its columns of Q and K, and gives the other three the parts of their rows' scores;
//   softmax  each warp adds up the scores of its eight rows, and gives all four the probabilities. Then it multiplies
//            those of the tile before by its columns of V.
//
// Tiles     64 query rows by TILE_K keys; 8 warps.
// Grid      as forward.cu.
// Budget    shared memory: K once, V twice and what warps exchange, or Q or the output tile; registers: of 512 columns
//           64 for Q, 128 for the accumulator, the scores. The columns of Q, K, V and the output are padded to 128.
// Barriers  two per key tile: between the phases, when the parts are there, and K has been read; and after the softmax,
//           when the next K and the probabilities are there, and the V of the tile before has been read.
// Edges     as forward.cu; chunks beyond the columns are zeros, and not stored.
//
// Chosen by a model of sm_75 at head dim 512 (python -m cupyattn turing, T4, 2026-11-28, with 330 cycles for a global
// load), where this loop had 0.54 of the tensor cores. Pairs of warps with 16 rows, each with half of the columns and
// the softmax of all 16, have 0.50: K and V are read from shared memory twice as often. Four warps with 32 rows that
// all do the softmax of all of them have 0.45: the parts of the scores are read four times. This scheme with P V of the
// same tile after the softmax has 0.51, and with all loads and stores of a tile at once 0.48. A CTA with half of the
// output's columns would compute the scores twice: 0.67 at the most.
#pragma once

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(M_TILES) || !defined(WARPS) || \
    !defined(TILE_K) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES)
#error \
    "DTYPE, HEAD_DIM, HEAD_DIM_V, M_TILES, WARPS, TILE_K, VEC, MIN_CTAS, SHARED_BYTES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(BIAS_VEC) || !defined(MASK) || !defined(MASK_VEC) || !defined(SLOPES) || \
    !defined(SOFTCAP) || !defined(SINKS) || !defined(DROPOUT) || !defined(MODIFIED)
#error \
    "BIAS, BIAS_VEC, MASK, MASK_VEC, SLOPES, SOFTCAP, SINKS, DROPOUT, MODIFIED come from a launch-configuration table"
#endif
#ifndef ASYNC_KEYS
#define ASYNC_KEYS 0  // whether tiles of keys pass no register: native/forward_wide.cuh
#endif
#include "../block_key_loop.cuh"
#include "../modifiers.cuh"
#include "dropout.cuh"
#include "epilogue.cuh"
#include "key_loader.cuh"
#include "products.cuh"
#include "resident_rows.cuh"
#include "score_exchange.cuh"
#include "score_items.cuh"
#include "softmax.cuh"

struct Traits {
  using Scalar = DTYPE;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = M_TILES;
  static constexpr int kTileK = TILE_K;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr int kGroups = WARPS / kSharing;
  static constexpr int kWarpRows = kMTiles * 16;
  static constexpr int kTileQ = kGroups * kWarpRows;
  static constexpr int kSteps = chunks_of_warp(kHeadDim);      // k8 steps of Q K^T in a warp's columns
  static constexpr int kOutTiles = chunks_of_warp(kHeadDimV);  // n8 tiles of the output in them
  static constexpr int kKeyTiles = kTileK / 8;                 // n8 tiles of the scores, k8 steps of P V

  using QTile = SwizzledTile<kTileQ, kSharing * kSteps>;
  using KTile = SwizzledTile<kTileK, kSharing * kSteps>;
  using VTile = SwizzledTile<kTileK, kSharing * kOutTiles>;
  using OutTile = SwizzledTile<kTileQ, kSharing * kOutTiles>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options, BIAS_VEC, MASK_VEC>;
  // Arrays that are read four keys at a time want threads that hold four neighbouring keys.
  static constexpr int kRun = BIAS_VEC == 4 || MASK_VEC == 4 ? 4 : 1;
  using Tile = ScoreTile<kMTiles, kKeyTiles, Along::kN8, kRun>;  // of the warps that share rows
  using OwnTile = ScoreTile<1, kKeyTiles, Along::kN8, kRun, 1>;  // of one of them
  using Items = ForwardItems<Pass, OwnTile>;
  using KTileLoader = TileLoader<KTile, kHeadDim, kVec, kThreads, Tile>;
  using VTileLoader = TileLoader<VTile, kHeadDimV, kVec, kThreads, Tile>;
  using Softmax = RowSoftmax<Scalar>;
  using Exchange = ScoreExchange<Tile, OwnTile, kGroups>;

  static constexpr bool kSinks = kGiven<SINKS>;
  static constexpr bool kDropout = DROPOUT;
  static constexpr bool kPass = Pass::kNeededInFull;

  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kTileK % 16 == 0, "dropout draws for 16 keys at least");
  static_assert(WARPS % kSharing == 0 && kWarpRows == kSharedRows, "four warps share 32 rows");
};

struct LoopSmem {
  KeyTiles<Traits::KTile, Traits::VTile, ASYNC_KEYS ? 2 : 1, 2> keys;
  Traits::Exchange exchange;
};

union Smem {
  LoopSmem loop;
  alignas(128) unsigned char q[Traits::QTile::kBytes];
  alignas(128) unsigned char out[Traits::OutTile::kBytes];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A warp's registers in the loop.
struct Warp {
  uint32 q[Traits::kMTiles][Traits::kSteps][2];      // A fragments of its columns
  float acc[Traits::kMTiles][Traits::kOutTiles][4];  // P V of its columns, times 2^kHeadroomLog2
  Traits::Softmax softmax;                           // of its own rows
  int first_row;                                     // of those that it shares, of the sequence

  __device__ __forceinline__ int first_own_row() const { return first_row + sharing_warp() * kOwnRows; }
};

// Values that are the same for all threads of the CTA.
struct Cta {
  FragmentAddress<Traits::KTile> k_fragment;
  FragmentAddress<Traits::VTile> v_fragment;
  const AttentionParams& params;
  const KeyWindow& window;
  const Traits::Pass& pass;
  Traits::Exchange& exchange;
  TileCoordinates coords;
};

// Do the parts of a tile's way that are due at step kStep of kSteps; or all.
template <int kParts, int kStep, int kSteps, int kPart = 0, typename Body>
__device__ __forceinline__ void at_parts(const Body& body) {
  if constexpr (kPart < kParts) {
    if constexpr (kPart * kSteps / kParts == kStep) body(TilePart{kPart, kParts});
    at_parts<kParts, kStep, kSteps, kPart + 1>(body);
  }
}
template <int kParts, typename Body>
__device__ __forceinline__ void every_part(const Body& body) {
  at_parts<kParts, 0, 1>(body);
}

// S += Q K^T over the warp's columns: step by step over all fragments, since few are independent. `between` does other
// work before each of kParts parts of it.
template <int kParts, int kGroup = 0, typename Between>
__device__ __forceinline__ void add_scores(Traits::Tile::Fragment& s, const Warp& warp, const Cta& cta, uint32 k_s,
                                           const Between& between) {
  constexpr int kGroups = chunk_groups(Traits::kSteps);
  at_parts<kParts, kGroup, kGroups>(between);
  uint32 b[Traits::kKeyTiles][kGroupChunks];
#pragma unroll
  for (int n = 0; n < Traits::kKeyTiles; n++) {
    ldmatrix(b[n], k_s + n * 8 * Traits::KTile::kRowBytes + cta.k_fragment.of_group(kGroup));
  }
#pragma unroll
  for (int step = 0; step < kGroupChunks; step += MMA_K / 8) {
    const int at = kGroup * kGroupChunks + step;
#pragma unroll
    for (int n = 0; n < Traits::kKeyTiles; n++) {
#pragma unroll
      for (int i = 0; i < Traits::kMTiles; i++) {
        if constexpr (MMA_K == 16) {
          mma_m16n8k16<Traits::Scalar>(s[n][i], warp.q[i][at], warp.q[i][at + 1], b[n][step], b[n][step + 1]);
        } else {
          mma_m16n8k8<Traits::Scalar>(s[n][i], warp.q[i][at], b[n][step]);
        }
      }
    }
  }
  if constexpr (kGroup + 1 < kGroups) add_scores<kParts, kGroup + 1>(s, warp, cta, k_s, between);
}

// O += P V, likewise: group by group of columns for 8 keys, then the next 8; from sm_80 on for 16.
template <int kParts, int kStep = 0, typename Between>
__device__ __forceinline__ void add_output(Warp& warp, const Cta& cta, const Traits::Tile::Packed& p, uint32 v_s,
                                           const Between& between) {
  constexpr int kGroups = chunk_groups(Traits::kOutTiles), kSteps = Traits::kKeyTiles * kGroups / (MMA_K / 8);
  constexpr int n = kStep / kGroups * (MMA_K / 8), kGroup = kStep % kGroups;
  at_parts<kParts, kStep, kSteps>(between);
  const uint32 rows_s = v_s + n * 8 * Traits::VTile::kRowBytes;
  if constexpr (MMA_K == 16) {
    uint32 b[2][kGroupChunks];
    ldmatrix_trans(b[0], rows_s + cta.v_fragment.of_group(kGroup));
    ldmatrix_trans(b[1], rows_s + 8 * Traits::VTile::kRowBytes + cta.v_fragment.of_group(kGroup));
#pragma unroll
    for (int tile = 0; tile < kGroupChunks; tile++) {
#pragma unroll
      for (int i = 0; i < Traits::kMTiles; i++) {
        mma_m16n8k16<Traits::Scalar>(warp.acc[i][kGroup * kGroupChunks + tile], p[n][i], p[n + 1][i], b[0][tile],
                                     b[1][tile]);
      }
    }
  } else {
    add_product_nn<kGroup, Traits::Scalar>(warp.acc, p[n], rows_s, cta.v_fragment);
  }
  if constexpr (kStep + 1 < kSteps) add_output<kParts, kStep + 1>(warp, cta, p, v_s, between);
}

// Scores of the warp's own rows to packed probabilities; m and l are kept right. Return the factor of what was
// accumulated before: 1 unless a maximum rose. Of a partial tile a block mask leaves the scores in `bits`.
template <bool kMasked>
__device__ __forceinline__ float softmax_tile(Traits::OwnTile::Packed& p, Scores<Traits::OwnTile>& scores, Warp& warp,
                                              const Traits::Items& items, const Cta& cta, int first_key,
                                              const Seen& seen, const SeenScores<Traits::OwnTile>& bits) {
  constexpr bool kPass = kMasked || Traits::kPass;
  const int first_row = warp.first_own_row();
  float sum, shrink = 1.f;
  if (kPass) cta.pass.template apply<kMasked>(scores, first_row, first_key, !Modifiers::kBlocks, items);
  if (Modifiers::kBlocks && kMasked && seen.partial) cta.pass.hide_unseen(scores, bits);
  if (kMasked && !seen.whole) scores.mask([&](int row) { return cta.window.of_row(first_row + row); }, first_key);
  if (kMasked) {
    shrink = warp.softmax.raise(scores.s);
    sum = warp.softmax.exponentiate(p, scores.s, kLog2E);
  } else {
    sum = warp.softmax.exponentiate(p, scores.s, kPass ? kLog2E : cta.params.scale_log2);
    if (warp.softmax.overflows(sum)) {  // rare: a score rose far above the stale maximum
      if (!kPass) cta.pass.template apply<false>(scores, first_row, first_key, false, items);
      shrink = warp.softmax.raise(scores.s);
      sum = warp.softmax.exponentiate(p, scores.s, kLog2E);
    }
  }
  warp.softmax.add(sum);
  return shrink;
}

// What was accumulated, times the factors of rows whose maxima rose: rarely any.
__device__ __forceinline__ void shrink_output(Warp& warp, const float (&shrink)[Traits::kMTiles][2]) {
  bool rose = false;
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) rose = rose || shrink[i][0] != 1.f || shrink[i][1] != 1.f;
  if (!__any_sync(kFullWarp, rose)) return;
#pragma unroll
  for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
    for (int n = 0; n < Traits::kOutTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) warp.acc[i][n][e] *= shrink[i][e / 2];
    }
  }
}

// What is on its way from one tile to the next, and how it moves: through registers. Each part of a tile's V is stored
// with the products of its scores, before it that of the next tile's K is fetched into the same registers; which is
// stored with the products of the output, before the next V is fetched. So all that moves is spread over the products:
// shared memory serves one access after the other.
#if !ASYNC_KEYS
template <typename Loader>
struct KeyMoves {
  typename Loader::Quads quads;

  // The first tile: K all the way.
  __device__ __forceinline__ void begin(const Loader& loader, uint32 k_s, typename Loader::Rows& first, int keys) {
    loader.template fetch_k<true>(quads, first, keys);
    loader.store_k(quads, k_s);
    loader.template fetch_v<true>(quads, first, keys);
  }
  template <bool kRagged>
  __device__ __forceinline__ void with_scores(const Loader& loader, uint32 v_s, uint32,
                                              const typename Loader::Rows& next, int, int next_keys, bool more,
                                              TilePart part) {
    loader.store_v(quads, v_s, part);
    if (more) loader.template fetch_k<kRagged>(quads, next, next_keys, part);
  }
  template <bool kRagged>
  __device__ __forceinline__ void with_output(const Loader& loader, uint32 next_k_s, const typename Loader::Rows& next,
                                              int next_keys, TilePart part) {
    loader.store_k(quads, next_k_s, part);
    loader.template fetch_v<kRagged>(quads, next, next_keys, part);
  }
  __device__ __forceinline__ void wait() const {}
  __device__ __forceinline__ void pass(const typename Loader::Rows&) const {}
};
#else
// By copies that pass none: of this tile's V and the next one's K, with the products of this one's scores.
template <typename Loader>
struct KeyMoves {
  typename Loader::Rows present;

  __device__ __forceinline__ void begin(const Loader& loader, uint32 k_s, typename Loader::Rows& first, int keys) {
    loader.template copy_k<true>(k_s, first, keys, {});
    wait();
    present = first;
  }
  template <bool kRagged>
  __device__ __forceinline__ void with_scores(const Loader& loader, uint32 v_s, uint32 next_k_s,
                                              const typename Loader::Rows& next, int keys, int next_keys, bool more,
                                              TilePart part) {
    loader.template copy_v<kRagged>(v_s, present, keys, part);
    if (more) loader.template copy_k<kRagged>(next_k_s, next, next_keys, part);
  }
  template <bool kRagged>
  __device__ __forceinline__ void with_output(const Loader&, uint32, const typename Loader::Rows&, int,
                                              TilePart) const {}
  __device__ __forceinline__ void wait() const {
    cp_async_commit_group();
    cp_async_wait_group<0>();
  }
  __device__ __forceinline__ void pass(const typename Loader::Rows& next) { present = next; }
};
#endif

// One key tile, and the output of the one before, if the warp's rows saw it (`pending`, which becomes whether they see
// this one). V takes the place of the tile before the last one, the next tile's K that of this one's, once that has
// been read, or with copies the other one (KeyMoves). The loader looks up the tile after the next one.
template <bool kMasked, typename Loader, typename Tile>
__device__ __forceinline__ void key_tile(Warp& warp, const Cta& cta, const Loader& loader, KeyMoves<Loader>& moves,
                                         const Tile& tile, int half, bool more, bool& pending,
                                         typename Loader::Rows& next, int next_keys, int after_next) {
  constexpr int kParts = Loader::kParts;
  const int first_key = tile * Traits::kTileK;
  const uint32 k_s = loader.k_s(half), next_k_s = loader.k_s(half ^ 1);
  const uint32 v_s = loader.v_s(half), last_v_s = loader.v_s(half ^ 1);

  // In a masked tile rows that warps share may see nothing, or everything.
  Seen seen;
  if (kMasked) {
    seen = seen_of<Traits::kWarpRows, Traits::kTileK>(cta.window, warp.first_row, first_key,
                                                      state_of(tile, sharing_group()));
  }

  // Phase 1: the products of this tile, each warp with its own columns.
  typename Loader::Entry ahead;
  if (Loader::kLookUp == LookUp::kFirst) ahead = loader.look_up(after_next);
  const auto move_first = [&](TilePart part) {
    moves.template with_scores<kMasked>(loader, v_s, next_k_s, next, cta.window.keys - first_key, next_keys,
                                        !kMasked || more, part);
  };
  SeenScores<Traits::OwnTile> bits = {};
  Traits::Items items;
  Scores<Traits::OwnTile> scores;
  Traits::Tile::Fragment parts;
  if (kMasked) every_part<kParts>(move_first);
  if (seen.active) {
    if (Modifiers::kBlocks && seen.partial) cta.pass.ask(bits, scores, warp.first_own_row(), first_key);
    clear(parts);
    add_scores<kMasked ? 0 : kParts>(parts, warp, cta, k_s, move_first);
    items.template load<kMasked>(cta.pass, warp.first_own_row(), first_key);
    cta.exchange.give(parts);
  }
  Traits::Tile::Packed p;
  float shrink[Traits::kMTiles][2];
  if (pending) {
    cta.exchange.take_packed(p);
    cta.exchange.take_factors(shrink);
  }
  __syncthreads();  // parts and V: written; K, p and factors: read

  // Phase 2: the output of the tile before; the softmax of this one, each warp of its own rows.
  if (seen.active) cta.exchange.take(scores.s, parts);
  const auto move_then = [&](TilePart part) {
    if (!kMasked || more) moves.template with_output<kMasked>(loader, next_k_s, next, next_keys, part);
  };
  if (seen.active) {
    Traits::OwnTile::Packed own_p;
    cta.exchange.give_factor(softmax_tile<kMasked>(own_p, scores, warp, items, cta, first_key, seen, bits));
    if constexpr (DROPOUT) {
      drop<Traits::OwnTile>(own_p, cta.params.scores, cta.coords, warp.first_own_row(), first_key);
    }
    cta.exchange.give_packed(own_p);
  }
  if (kMasked) every_part<kParts>(move_then);
  if (Loader::kLookUp != LookUp::kFirst) ahead = loader.look_up(after_next);
  if (pending) {
    shrink_output(warp, shrink);
    add_output<kMasked ? 0 : kParts>(warp, cta, p, last_v_s, move_then);
  } else if (!kMasked) {
    every_part<kParts>(move_then);
  }
  pending = seen.active;
  moves.wait();
  __syncthreads();  // K, p and factors: written; parts and the last tile's V: read
  moves.pass(next);
  loader.keep(next, ahead);
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
  warp.first_row = coords.first_row + sharing_group() * Traits::kWarpRows;
  load_rows<Traits::QTile, Traits::kHeadDim, Traits::kVec, Traits::kThreads, RowsInOrder>(
      shared_address(smem.q), query_row(arrays.q_g, params.q, coords, coords.first_row), params.q.seq, rows, chunks);
  __syncthreads();  // q: written
  load_own_rows_first<Traits::QTile>(warp.q, shared_address(smem.q), sharing_group() * Traits::kWarpRows,
                                     sharing_warp() * Traits::kSteps);
  clear(warp.acc);
  __syncthreads();  // q: read; K, V and the exchange take its place

  // Phase 3: the loop over the keys, masked tiles first.
  const Cta cta = {FragmentAddress<Traits::KTile>(sharing_warp() * Traits::kSteps),
                   FragmentAddress<Traits::VTile>(sharing_warp() * Traits::kOutTiles),
                   params,
                   window,
                   pass,
                   smem.loop.exchange,
                   coords};
  auto loader = keys.template loader<Traits>(coords, window, rows, smem.loop.keys);
  auto tile = loop.first, next_tile = loop.after(tile);
  int left = loop.tiles();
  const int full = left - loop.masked;
  auto next = loader.rows(tile);
  bool pending = false;
  KeyMoves<decltype(loader)> moves;
  if (left > 0) {
    const auto ahead = loader.look_up(next_tile);
    moves.begin(loader, loader.k_s(left & 1), next, window.keys - tile * Traits::kTileK);
    loader.keep(next, ahead);
  }
  __syncthreads();  // K: the first tile has been written
#pragma unroll 1
  for (; left > full; left--) {
    if (!Modifiers::kBlocks) next_tile = loop.after(tile);  // carried along, it would take a register
    const auto after_next = loop.after(next_tile);
    loader.move_to(next, next_tile);
    key_tile<true>(warp, cta, loader, moves, tile, left & 1, left > 1, pending, next,
                   window.keys - next_tile * Traits::kTileK, after_next);
    tile = next_tile;
    next_tile = after_next;
  }
  loader.renew();
  if constexpr (Modifiers::kBlocks) loader.move_to_listed(next, next_tile);
#pragma unroll 1
  for (; left > 0; left--) {
    if constexpr (Modifiers::kBlocks) {
      const auto after_next = loop.whole_after(next_tile);
      key_tile<false>(warp, cta, loader, moves, tile, left & 1, true, pending, next, Traits::kTileK, after_next);
      tile = next_tile;
      next_tile = after_next;
      loader.move_to_listed(next, next_tile);
    } else {
      if (left > 1) loader.move_on(next);
      key_tile<false>(warp, cta, loader, moves, tile, left & 1, true, pending, next, Traits::kTileK, tile + 2);
      tile++;
    }
  }

  if (pending) {
    Traits::Tile::Packed p;
    float shrink[Traits::kMTiles][2];
    smem.loop.exchange.take_packed(p);
    smem.loop.exchange.take_factors(shrink);
    shrink_output(warp, shrink);
    add_output<0>(warp, cta, p, loader.v_s(1), [](TilePart) {});  // the last tile's half
  }

  // Phase 4: normalise, and store through shared memory: fragments hold 4 bytes of a row each. Or store sums.
  const OutputRows<Traits> output = {params, coords, warp.first_row, sharing_group(),
                                     sharing_warp() * Traits::kOutTiles};
  const float l = warp_reduce<Sum, 4>(warp.softmax.l);
  const int own_row = warp.first_own_row() + lane_index() / 4;
  const bool writes = lane_index() % 4 == 0 && own_row < coords.sq;
  if constexpr (Split::kAll) {
    const RowEnd<Traits::Softmax> end(l, warp.softmax.m, Traits::kSinks,
                                      sink_log2<SINKS>(arrays.sinks_g, params, coords.head));
    if (arrays.lse_g != nullptr && writes) *query_row(arrays.lse_g, params.lse, coords, own_row) = end.lse();
    __syncthreads();  // factors: read
    smem.loop.exchange.give_factor(Traits::kDropout ? end.normaliser * params.scores.keep_scale : end.normaliser);
    __syncthreads();  // factors: written
    float normalisers[Traits::kMTiles][2];
    smem.loop.exchange.take_factors(normalisers);
    __syncthreads();  // factors, K, V and p: read; the output takes their place
#pragma unroll
    for (int from = 0; from < kSharing; from++) {
      const int row = from * kOwnRows + lane_index() / 4;
      output.put(shared_address(smem.out), warp.acc[from / 2], row, from % 2, normalisers[from / 2][from % 2]);
    }
    __syncwarp();  // out: each warp reads what it wrote itself
    output.store(smem.out, arrays.out_g);
  } else {
    constexpr float kScale = OutputRows<Traits>::kSumScale;
    const float acc_scale = Traits::kDropout ? kScale * params.scores.keep_scale : kScale;
#pragma unroll
    for (int from = 0; from < kSharing; from++) {
      const int query = warp.first_row + from * kOwnRows + lane_index() / 4;
      if (query >= coords.sq) continue;
      output.store_sum(split.out_g + split.row(coords, query) * Traits::kHeadDimV, warp.acc[from / 2], from % 2,
                       acc_scale);
    }
    if (writes) {
      split.sums_g[split.row(coords, own_row)] =
          make_float2(warp.softmax.m + Traits::Softmax::shift_log2(), l * Traits::Softmax::unshift() * kScale);
    }
  }
}
