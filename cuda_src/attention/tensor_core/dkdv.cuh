// The common part of the kernels of dK and dV: their tiles and options, and the way of the keys, which a CTA keeps
// for its whole life, and of their gradients.
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
