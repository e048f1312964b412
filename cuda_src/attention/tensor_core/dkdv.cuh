// The common part of the kernels of dK and dV: their tiles and options, and the way of the keys, which a CTA keeps
// for its whole life, and of their gradients; and the phases of the kernels whose warps are of two kinds.
#pragma once

#if !defined(DTYPE) || !defined(NATIVE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(WARPS) ||    \
    !defined(TILE_Q) || !defined(ONE_PASS) || !defined(VEC) || !defined(MIN_CTAS) || !defined(SHARED_BYTES) || \
    !defined(L2_AHEAD) || !defined(DQ_ROW_WARPS) || !defined(DQ_PARTS) || !defined(UNROLL)
#error \
    "DTYPE, NATIVE, HEAD_DIM, HEAD_DIM_V, WARPS, TILE_Q, ONE_PASS, VEC, MIN_CTAS, SHARED_BYTES, L2_AHEAD, DQ_ROW_WARPS, DQ_PARTS, UNROLL come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SCORE_VEC) || !defined(SLOPES) || !defined(SOFTCAP) || \
    !defined(DROPOUT) || !defined(MODIFIED) || !defined(DBIAS) || !defined(DBIAS_ACCUMULATE)
#error \
    "BIAS, MASK, SCORE_VEC, SLOPES, SOFTCAP, DROPOUT, MODIFIED, DBIAS, DBIAS_ACCUMULATE come from a launch-configuration table"
#endif
#include "../../common/barrier.cuh"
#include "../backward_sequences.cuh"
#include "block_query_loader.cuh"
#include "dq_product.cuh"
#include "resident_rows.cuh"
#include "row_statistics.cuh"
#include "score_gradient.cuh"

// kKeyWarps warps with kMTiles * 16 keys each; kSubTiles * 8 queries at a time. kSlices_ > 1: warps share the columns
// of a row in so many slices of whole groups of chunks, and tiles have zeros beyond the columns.
template <int kMTiles_, int kKeyWarps, int kSubTiles_, int kDqRowWarps, int kSlices_ = 1>
struct DkdvTraits {
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kMTiles = kMTiles_;
  static constexpr int kTileQ = TILE_Q;
  static constexpr int kThreads = WARPS * kWarpSize;
  static constexpr bool kOnePass = ONE_PASS;
  static constexpr int kWarpKeys = kMTiles * 16;
  static constexpr int kKeys = kKeyWarps * kWarpKeys;
  static constexpr int kSlices = kSlices_;
  __host__ __device__ static constexpr int steps(int columns) {
    return kSlices == 1 ? div_up(columns, 8) : slice_steps(columns, kSlices) * kSlices;
  }
  static constexpr int kSteps = steps(kHeadDim);    // k8 steps of S, n8 tiles of dK
  static constexpr int kStepsV = steps(kHeadDimV);  // k8 steps of dP, n8 tiles of dV
  static constexpr int kSubTiles = kSubTiles_;
  static constexpr int kSubRows = kSubTiles * 8;
  static constexpr int kTogether = MMA_K == 16 && kSubTiles % 2 == 0 ? 2 : 1;  // n8 tiles of weights in one product
  static constexpr bool kNative = NATIVE;  // sm_80 or later: copies to shared memory, and one barrier per tile
  static constexpr bool kKeepsKeys = kOnePass && kSlices == 1;  // K stays in shared memory, for dQ
  // Of Q and dout: the dQ product leaves time to refill one. Of more than 256 columns two do not fit on Turing.
  static constexpr int kBuffers = (kOnePass || kSlices > 1) && !kNative ? 1 : 2;
  static constexpr int kDsBuffers = kOnePass && kNative ? 2 : 1;

  using KTile = SwizzledTile<kKeys, kSteps>;
  using VTile = SwizzledTile<kKeys, kStepsV>;
  using QTile = SwizzledTile<kTileQ, kSteps>;
  using DoutTile = SwizzledTile<kTileQ, kStepsV>;
  using DsTile = SwizzledTile<kKeys, kTileQ / 8>;  // dS^T
  // Where warps share columns, half of the threads bring Q and the others dout, each in two parts. (Copies of native
  // kernels take no registers: all threads bring both.)
  static constexpr bool kByHalves = kSlices > 1 && !kNative;
  static constexpr int kLoadingThreads = kByHalves ? kThreads / 2 : kThreads;
  using QTileLoader = TileLoader<QTile, kHeadDim, kVec, kLoadingThreads>;
  using DoutTileLoader =
      TileLoader<DoutTile, kHeadDimV, kVec, kLoadingThreads, RowsInOrder, kByHalves ? kThreads / 2 : 0>;
  static constexpr int kRun = SCORE_VEC < 2 * kMTiles ? SCORE_VEC : 2 * kMTiles;
  using Tile = ScoreTile<kMTiles, kSubTiles, Along::kM16, kRun>;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Dbias = DbiasOptions<DBIAS, DBIAS_ACCUMULATE>;
  using Loader = QueryLoaderOf<Modifiers::kBlocks, QTileLoader, DoutTileLoader, kBuffers, kNative, kByHalves ? 2 : 1>;
  using DqWarp = DqSlice<DsTile, KTile, kTileQ, WARPS, kDqRowWarps, DQ_PARTS>;

  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kTileQ % kSubRows == 0 && kRowPad % kTileQ == 0, "whole tiles in the padded rows");
};

// The CTA's arrays.
struct GradientArrays {
  const DTYPE *q_g, *k_g, *v_g, *dout_g;
  const float* statistics_g;
  float* dq_acc_g;
  OptionArrays options;
};

// The addresses of the gradients of a sequence's keys. A kernel computes it after its loop: what leads to a packed
// sequence's rows it would otherwise keep in registers, and spill registers of the loop (the backward of head dim 64 in
// one pass modelled 0.68 then and 0.71 now, at head dim 128 in two 0.55 and 0.70; `python -m cupyattn turing`, T4,
// 2026-11-26).
struct KeyGradients {
  int keys;
  DTYPE *dk_g, *dv_g;
};

// V and K, one after the other, through shared memory into registers: take_v and take_k fetch a warp's part.
template <typename T, typename Barrier, typename Smem, typename TakeV, typename TakeK>
__device__ __forceinline__ void load_keys(Smem& smem, const AttentionParams& params, const KeyWindow& window,
                                          const KeyTileCoordinates& coords, const DTYPE* k_g, const DTYPE* v_g,
                                          TakeV take_v, TakeK take_k) {
  const int rows = window.keys - coords.first_key;
  load_rows<typename T::VTile, T::kHeadDimV, T::kVec, T::kThreads, typename T::Tile>(
      shared_address(smem.v), head_rows(v_g, params.v, coords.batch, coords.kv_head, coords.first_key), params.v.seq,
      rows);
  Barrier::wait();  // v: written
  take_v(shared_address(smem.v));
  Barrier::wait();  // v: read; K takes its place
  load_rows<typename T::KTile, T::kHeadDim, T::kVec, T::kThreads, typename T::Tile>(
      shared_address(smem.k), head_rows(k_g, params.k, coords.batch, coords.kv_head, coords.first_key), params.k.seq,
      rows);
  Barrier::wait();  // k: written
  take_k(shared_address(smem.k));
  if (!T::kKeepsKeys) Barrier::wait();  // k: read; Q and dout take its place
}

// Where dS^T of the loader's present tile is, from the first buffer.
template <typename T, typename Loader>
__device__ __forceinline__ uint32 ds_buffer(const Loader& loader) {
  return T::kDsBuffers == 1 ? 0 : loader.left % 2u * T::DsTile::kBytes;
}

// The end of a query tile: the next one to shared memory, and with ONE_PASS dQ of the present one on the way. Native
// kernels have another dS^T for the next tile, so that warps begin it as soon as their part of dQ is done.
template <typename T, typename Barrier, typename Loader>
__device__ __forceinline__ void finish_tile(Loader& loader, float* dq_acc_g, uint32 ds_s, uint32 k_s) {
  if constexpr (T::kNative) {
    loader.arrive();
    Barrier::wait();  // Q, dout: this tile has been read, the next one written; ds: written, the other one read
    if constexpr (T::kOnePass) {
#pragma unroll 1
      for (int part = 0; part < T::DqWarp::kPartCount; part++) {
        typename T::DqWarp(part).add(dq_acc_g + accumulator_offset<T::kSteps>(loader.scratch_row),
                                     ds_s + ds_buffer<T>(loader), k_s);
      }
    }
    return;
  }
  if constexpr (T::kOnePass) {
    Barrier::wait();  // Q, dout: read; ds: written
    loader.store_q();
    loader.fetch_dout();
    typename T::DqWarp().add(dq_acc_g + accumulator_offset<T::kSteps>(loader.scratch_row), ds_s, k_s);
  }
  loader.store_dout();
  Barrier::wait();  // Q, dout: the next tile has been written; ds: read
}

// Call tile() for each query tile but the last `remaining`.
template <typename Loader, typename Tile>
__device__ __forceinline__ void loop_over_tiles(Loader& loader, const float* statistics_g, int remaining, Tile tile) {
#pragma unroll 1
  while (loader.left > remaining) {
    loader.move_to_run();
#pragma unroll 1
    do {
      tile();
      loader.template bring_to_l2<L2_AHEAD>(statistics_g);
      loader.advance();
    } while (loader.left > remaining && loader.in_run());
  }
}

// dV and dK, one after the other through shared memory: fragments hold 4 bytes of a row each. give_v and give_k put a
// warp's part there.
template <typename T, typename Barrier, typename Smem, typename GiveV, typename GiveK>
__device__ __forceinline__ void store_gradients(Smem& smem, const BackwardParams& params,
                                                const KeyTileCoordinates& coords, const ScaleArrays& scales,
                                                const KeyGradients& gradients, GiveV give_v, GiveK give_k) {
  if constexpr (T::kNative && T::kOnePass) Barrier::wait();  // ds, k: read
  const int rows = gradients.keys - coords.first_key;
  const float keep_scale = DROPOUT ? params.attention.scores.keep_scale : 1.f;
  give_v(shared_address(smem.v), kUnboost * keep_scale);
  Barrier::wait();  // v: dV is complete
  store_rows<typename T::VTile, T::kHeadDimV, T::kVec, T::kThreads, typename T::Tile>(
      head_rows(gradients.dv_g, params.dv, coords.batch, coords.kv_head, coords.first_key), params.dv.seq, smem.v, rows,
      params.accumulate);
  Barrier::wait();  // v: read; dK takes its place
  give_k(shared_address(smem.k), params.scale * scales.up());
  Barrier::wait();  // k: dK is complete
  store_rows<typename T::KTile, T::kHeadDim, T::kVec, T::kThreads, typename T::Tile>(
      head_rows(gradients.dk_g, params.dk, coords.batch, coords.kv_head, coords.first_key), params.dk.seq, smem.k, rows,
      params.accumulate);
}

// Call the kernel's add_up_gradients() for the keys of a CTA, if it has any, with the parameters and arrays of their
// sequence. `arrays`, `dk_g` and `dv_g` are those of all sequences.
template <typename Own>
__device__ __forceinline__ void add_up_own_gradients(const Own& own, const GradientParams& params,
                                                     const GradientArrays& arrays, DTYPE* dk_g, DTYPE* dv_g) {
  if (!own.exist()) return;
  const AttentionParams& longest = own.sequences.attention;
  const auto& backward = params_of(params, own.queries(), own.keys());
  const RowSpan queries = own.queries(), keys = own.keys();
  const KeyTileCoordinates coords = own.coords();
  add_up_gradients(
      backward,
      GradientArrays{rows_from(arrays.q_g, longest.q, queries), rows_from(arrays.k_g, longest.k, keys),
                     rows_from(arrays.v_g, longest.v, keys), rows_from(arrays.dout_g, backward.dout, queries),
                     arrays.statistics_g, arrays.dq_acc_g, arrays.options},
      coords, own.window(), [&] { return own.q_offset(); },
      [&] {
        const RowSpan stored = own.keys_again();
        return KeyGradients{stored.count, rows_from(dk_g, backward.dk, stored), rows_from(dv_g, backward.dv, stored)};
      });
}

// Kernels with two kinds of warps: the first half of a CTA's warps has K and dK, the other half has V and dV. The two
// kinds reach the CTA's barrier from different places in the code, so it is counted.
struct CountedBarrier {
  __device__ __forceinline__ static void wait() { bar_sync(0, WARPS * kWarpSize); }
};

// Values that are the same for all threads of the CTA.
template <typename Smem>
struct CtaOfTwoKinds {
  Smem& smem;
  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  int64 q_offset;
  const float* statistics_g;
  float* dq_acc_g;
  KeyTileCoordinates coords;
  GradientScale scale;
};

// Phases 2 to 4, for a warp of one kind. The kernel defines begin_tiles(), query_tile() and end_tiles() for its warps.
template <typename T, typename Warp, typename Loader, typename Cta, typename Gradients>
__device__ __forceinline__ void run_phases(const Cta& cta, const GradientArrays& arrays, Gradients gradients) {
  const BackwardParams& params = cta.params;
  const KeyTileCoordinates& coords = cta.coords;
  const auto loop =
      loop_over_queries<T::kTileQ>(params.attention, cta.window, coords, T::kKeys, cta.arrays.modifiers.blocks);

  // Phase 2: V and K, through shared memory into registers.
  Warp warp;
  if (loop.tiles() > 0) {
    load_keys<T, CountedBarrier>(
        cta.smem, params.attention, cta.window, coords, arrays.k_g, arrays.v_g,
        [&](uint32 v_s) {
          if (Warp::kOfKeys) return;
          warp.take(v_s);
          scale_fragments(warp.rows, cta.scale.down);
        },
        [&](uint32 k_s) {
          if (Warp::kOfKeys) warp.take(k_s);
        });
  }

  // Phase 3: the loop over the query tiles.
  Loader loader(params, loop, coords, arrays.q_g, arrays.dout_g, cta.smem.loop.queries);
  begin_tiles(warp, cta, loader);
  CountedBarrier::wait();  // Q and dout: the first tile has been written
  loop_over_tiles(loader, arrays.statistics_g, 0, [&] { query_tile(warp, cta, loader); });
  end_tiles(warp, cta);

  // Phase 4: the gradients.
  store_gradients<T, CountedBarrier>(
      cta.smem, params, coords, cta.arrays.scales, gradients(),
      [&](uint32 v_s, float scale) {
        if (!Warp::kOfKeys) warp.give(v_s, scale);
      },
      [&](uint32 k_s, float scale) {
        if (Warp::kOfKeys) warp.give(k_s, scale);
      });
}

// The keys of one CTA. `q_offset()` is the key position of query 0, `gradients()` where results go.
template <typename T, typename KeyWarp, typename ValueWarp, typename Smem, typename Offset, typename Gradients>
__device__ __forceinline__ void add_up_by_kinds(Smem& smem, const BackwardParams& params, const GradientArrays& arrays,
                                                const KeyTileCoordinates& coords, const KeyWindow& window,
                                                Offset q_offset, Gradients gradients) {
  // Phase 1: the part that this warp has.
  const ScaleArrays& scales = arrays.options.scales;
  const GradientScale scale = scales.of_head(params, coords.batch, coords.kv_head * params.attention.group);
  scales.set_aside(scale);
  const CtaOfTwoKinds<Smem> cta = {
      smem, params, window, arrays.options, q_offset(), arrays.statistics_g, arrays.dq_acc_g, coords, scale};
  if (warp_index() < WARPS / 2) {
    run_phases<T, KeyWarp, typename T::Loader>(cta, arrays, gradients);
  } else {
    run_phases<T, ValueWarp, typename T::Loader>(cta, arrays, gradients);
  }
}
