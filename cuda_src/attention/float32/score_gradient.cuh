// A tile of scores of the float32 backward, from its products to P and dS in registers:
//
//   s = softmax_scale * q . k (+ options),   p = exp(s - lse),   ds = p (keep dout . v - delta)
//
// (Dao et al., arXiv:2205.14135, appendix B.2)
#pragma once

#if !defined(BIAS) || !defined(MASK) || !defined(SLOPES) || !defined(SOFTCAP) || !defined(DROPOUT) || !defined(MODIFIED)
#error "BIAS, MASK, SLOPES, SOFTCAP, DROPOUT and MODIFIED come from a launch-configuration table"
#endif
#include "../backward_params.cuh"
#include "backward_loader.cuh"
#include "../modifiers.cuh"
#include "../scores.cuh"
#include "row_sums.cuh"

constexpr int kPartFloats = 4096;  // of P or dS, in shared memory

struct BackwardTraits {
  using Scalar = DTYPE;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options>;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kVec = VEC;
  static constexpr int kTileQ = TILE_Q;
  static constexpr int kTileK = TILE_K;
  // Columns with those that threads add.
  __host__ __device__ static constexpr int padded(int columns) { return round_up(columns, 4 * kThreadColumns); }
  static constexpr int kPaddedDim = round_up(kHeadDim, 4 * kThreadColumns);
  static constexpr int kPaddedDimV = round_up(kHeadDimV, 4 * kThreadColumns);
  // Slices of queries' and keys' rows fill a buffer.
  static constexpr int kSliceDepth = 16 * (kTileQ + kTileK) <= kBufferFloats ? 16 : 8;
  template <int kRows, int kCols>
  using Slices = ColumnSlices<Scalar, kRows, kCols, kSliceDepth, kVec>;
  using QKSlices = SlicePair<Slices<kTileQ, kHeadDim>, Slices<kTileK, kHeadDim>>;
  using DoutVSlices = SlicePair<Slices<kTileQ, kHeadDimV>, Slices<kTileK, kHeadDimV>>;
  // Shared memory holds P and dS of so many queries, or dS of so many keys, at a time.
  static constexpr int kPartQ = kTileQ * kTileK <= kPartFloats ? kTileQ : kPartFloats / kTileK;
  static constexpr int kPartK = kTileQ * kTileK <= kPartFloats ? kTileK : kPartFloats / kTileQ;
  static constexpr int kWeightFloats = kPartQ * kTileK;
  static_assert(kPartQ * kTileK == kPartK * kTileQ && kTileQ % kPartQ == 0 && kTileK % kPartK == 0, "whole parts");
  static_assert(kTileQ <= kProductThreads, "each thread brings the sums of one row at the most");
  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
};

// Scores of kTileQ queries by kTileK keys, as the options of the scores take them.
struct ScoreTile : Product<BackwardTraits::kTileQ, BackwardTraits::kTileK> {
  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
#pragma unroll
    for (int m = 0; m < kThreadM; m++) {
#pragma unroll
      for (int n = 0; n < kThreadN; n += 2) body(&c[m][n], row_of(m), column_of(n));
    }
  }
  __device__ __forceinline__ static int lane_row() { return row_of(0); }
  __device__ __forceinline__ static int lane_key() { return column_of(0); }
};

// Values of the queries' rows that the gradients of a tile's scores need, in shared memory.
struct TileSums {
  alignas(16) float lse_log2[BackwardTraits::kTileQ];  // infinity for a row without keys: every weight is 0
  alignas(16) float delta[BackwardTraits::kTileQ];
};

// Values that the gradients of one head's scores need besides the products.
struct HeadScores {
  const BackwardParams& params;
  const KeyWindow& window;
  const BackwardTraits::Pass& pass;
  const float *lse_g, *delta_g;  // of row 0

  // The sums of one row of a tile for each thread: `store_sums` is for later, when they have come.
  __device__ __forceinline__ float2 fetch_sums(int first_row) const {
    const int row = first_row + threadIdx.x;
    if (threadIdx.x >= BackwardTraits::kTileQ || row >= params.attention.sq) return make_float2(-kInfinity, 0.f);
    return make_float2(lse_g[row * params.attention.lse.seq], delta_g[row]);
  }
  __device__ __forceinline__ static void store_sums(TileSums& tile, float2 fetched) {
    if (threadIdx.x >= BackwardTraits::kTileQ) return;
    const RowSums sums(fetched.x, fetched.y);
    tile.lse_log2[threadIdx.x] = sums.lse_log2;
    tile.delta[threadIdx.x] = sums.delta;
  }

  // From products to the weights of the values, dropout's factor included, and the gradients of the products. `write`
  // gets each score's own gradient: write(ds, row, key).
  //
  // A weight is held to at most 1: where a row's lse lies beyond 1e7 (a finite bias on all its keys), its digits end
  // before the point, and exp(s - lse) would overflow.
  // `partial`: the tile may not be seen in full, by a block mask or without one.
  template <typename Write>
  __device__ __forceinline__ void turn_to_gradients(ScoreTile& s, ScoreTile& dp, const TileSums& sums, int tile_row,
                                                    int tile_key, bool partial, Write write) const {
    const int first_row = not_hoisted(tile_row), first_key = not_hoisted(tile_key);
    const ScoreParams& scores = params.attention.scores;
    ScoreTile slope;
    if (SOFTCAP) {
      slope = s;
      slope.for_each_pair([&](float* pair, int, int) {
        pair[0] = softcap_slope(pair[0], scores);
        pair[1] = softcap_slope(pair[1], scores);
      });
    }
    const float scale_log2 = BackwardTraits::Pass::kNeeded ? kLog2E : params.attention.scale_log2;
    ScoreTile unmodified;
    if (BackwardTraits::Pass::kNeeded) {
      pass.template apply_options<true>(s, first_row, first_key);
      if (Modifiers::kScore) unmodified = s;
      pass.modify(s, first_row, first_key);
      pass.template hide<true>(s, first_row, first_key, partial);
    }
    hide(s, first_row, first_key);
#pragma unroll
    for (int m = 0; m < ScoreTile::kThreadM; m++) {
      const int at = ScoreTile::row_of(m);
      const float lse_log2 = sums.lse_log2[at], delta = sums.delta[at];
#pragma unroll
      for (int n = 0; n < ScoreTile::kThreadN; n++) {
        const int row = first_row + at, key = first_key + ScoreTile::column_of(n);
        const float p_log2 = __fmaf_rn(s.c[m][n], scale_log2, -lse_log2);
        const float p = ex2_approx(p_log2 > 0.f ? 0.f : p_log2);  // a NaN stays one
        const float keep = DROPOUT ? dropout_factor(scores, pass.batch, pass.head, row, key) : 1.f;
        float ds = p * (keep * dp.c[m][n] - delta);
        if constexpr (Modifiers::kScore) ds = pass.gradient(unmodified.c[m][n], ds, row, key);
        const bool seen = s.c[m][n] != -kInfinity && row < params.attention.sq;
        if (seen) write(ds, row, key);
        s.c[m][n] = seen ? p * keep : 0.f;
        dp.c[m][n] = seen ? (SOFTCAP ? ds * slope.c[m][n] : ds) : 0.f;
      }
    }
  }

 private:
  // Scores outside of what their row sees become -inf.
  __device__ __forceinline__ void hide(ScoreTile& s, int first_row, int first_key) const {
    const KeyRange top = window.of_row(first_row), bottom = window.of_row(first_row + BackwardTraits::kTileQ - 1);
    if (bottom.begin <= first_key && first_key + BackwardTraits::kTileK <= top.end) return;
#pragma unroll
    for (int m = 0; m < ScoreTile::kThreadM; m++) {
      const KeyRange visible = window.of_row(first_row + ScoreTile::row_of(m));
#pragma unroll
      for (int n = 0; n < ScoreTile::kThreadN; n++) {
        if (!visible.contains(first_key + ScoreTile::column_of(n))) s.c[m][n] = -kInfinity;
      }
    }
  }
};

// scores = A B^T over the kCols columns that `loader` brings.
template <int kCols, typename Loader, typename Next>
__device__ __forceinline__ void multiply_columns(ScoreTile& scores, Buffers& buffers, const Loader& loader,
                                                 const Next& next) {
  scores.clear();
  buffers.run(loader, next, [&](uint32 buffer_s, int number) {
    const int depth =
        kCols % Loader::kDepth == 0 ? Loader::kDepth : min(Loader::kDepth, kCols - number * Loader::kDepth);
    scores.template add<Loader::kDepth>(buffer_s, 0, buffer_s + Loader::kSecondAt, depth);
  });
}

// product += W^T R for the rows R that `loader` brings. fill(part) writes the weights of kPart rows to shared memory,
// part by part.
template <int kPart, typename Result, typename Loader, typename Next, typename Fill>
__device__ __forceinline__ void multiply_rows(Result& product, Buffers& buffers, uint32 weights_s, const Loader& loader,
                                              const Next& next, Fill fill) {
  constexpr int kPartSteps = kPart / Loader::kDepth;
  fill(0);
  __syncthreads();  // weights: written
  buffers.run(loader, next, [&](uint32 buffer_s, int number) {
    const int at = number % kPartSteps;
    if (kPartSteps < Loader::kSteps && at == 0 && number > 0) {
      fill(number / kPartSteps);
      __syncthreads();  // weights: the next part has been written
    }
    product.template add<Loader::kDepth>(weights_s, at * Loader::kDepth, buffer_s);
  });
}

// Round and store what exists of a result whose rows and columns are those of an array from rows_g on.
template <typename Result>
__device__ __forceinline__ void store_product(const Result& product, BackwardTraits::Scalar* rows_g, int64 row_stride,
                                              int rows, int cols, float factor, const BackwardParams& params) {
  product.for_each(rows, cols, [&](float x, int row, int col) {
    store_gradient(rows_g + row * row_stride + col, factor * x, params);
  });
}
