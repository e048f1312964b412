// The end of the float32 forward: each thread normalises what it has of its warp's rows and stores it.
#pragma once

#include "../../common/vec.cuh"
#include "forward_products.cuh"
#include "../params.cuh"
#include "../../common/reduce.cuh"
#include "score_tile.cuh"

// The online softmax (Milakov and Gimelshein, arXiv:1805.02867) of a warp's rows in plain registers (score_tile.cuh),
// in float32 throughout.
//
// Stale maximum: float32 holds P = 2^(s - m) as exactly for an m that is not the maximum, so a row keeps the m of an
// earlier tile while its scores stay below 2^kHeadroomLog2 times it. Each thread compares its own scores; only where
// one rises higher are maxima exchanged between lanes and what was accumulated rescaled. Row sums stay per thread until
// the end.

constexpr float kHeadroomLog2 = 10.f;  // what P V loses of float32's range
constexpr float kNoMaximum = -3e38f;   // no key seen: finite, so that differences are never NaN

template <typename Scores, int kColumns>
struct Softmax {
  static constexpr int kRows = Scores::kRows;
  using Grid = typename Scores::Grid;

  float acc[kRows][kColumns];  // P V
  float m[kRows];              // the stale maximum in log2
  float l[kRows];              // this thread's part of the row's sum of P

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      m[i] = kNoMaximum;
      l[i] = 0.f;
#pragma unroll
      for (int c = 0; c < kColumns; c++) acc[i][c] = 0.f;
    }
  }

  // From scores, in log2 after a factor scale >= 0, to P.
  __device__ __forceinline__ void exponentiate(Scores& scores, float scale) {
    float largest[kRows];
    bool rises = false;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      largest[i] = scores.s[i][0];
#pragma unroll
      for (int j = 1; j < Scores::kKeys; j++) largest[i] = fmaxf(largest[i], scores.s[i][j]);
      rises = rises || __fmaf_rn(largest[i], scale, -m[i]) > kHeadroomLog2;
    }
    if (__any_sync(kFullWarp, rises)) raise(largest, scale);
#pragma unroll
    for (int i = 0; i < kRows; i++) {
#pragma unroll
      for (int j = 0; j < Scores::kKeys; j++) {
        scores.s[i][j] = ex2_approx(__fmaf_rn(scores.s[i][j], scale, -m[i]));
        l[i] += scores.s[i][j];
      }
    }
  }

 private:
  __device__ __forceinline__ void raise(const float (&largest)[kRows], float scale) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const float old_m = m[i];
      // Rounded up: of a maximum of -1e10 the rounding is hundreds, and below it P would overflow.
      m[i] = fmaxf(old_m, __fmul_ru(Grid::template reduce_row<Max>(largest[i]), scale));
      const float shrink = ex2_approx(old_m - m[i]);
      l[i] *= shrink;
#pragma unroll
      for (int c = 0; c < kColumns; c++) acc[i][c] *= shrink;
    }
  }
};

// The rows of one warp; Traits as in forward.cuh.
template <typename Traits>
struct OutputRows {
  using Scalar = typename Traits::Scalar;
  using Columns = typename Traits::Columns;
  using Grid = typename Traits::Grid;

  const AttentionParams& params;
  const TileCoordinates& coords;
  int first_row;  // of the sequence

  // Normalise the thread's part of its rows and write it and the rows' lse to memory.
  __device__ __forceinline__ void store(const typename Traits::Softmax& softmax, float sink, Scalar* out_g,
                                        float* lse_g) const {
#pragma unroll
    for (int i = 0; i < Traits::kRows; i++) {
      const float l = Grid::template reduce_row<Sum>(softmax.l[i]);
      const float m = softmax.m[i];
      float total = l, scale = 1.f, top = m;
      if (Traits::kSinks) {  // one more term of the denominator
        top = fmaxf(m, sink);
        scale = ex2_approx(m - top);
        total = l * scale + ex2_approx(sink - top);
      }
      // No key: 0. A NaN in l stays one.
      float normaliser = total == 0.f ? 0.f : scale / total;
      if (Traits::kDropout) normaliser *= params.scores.keep_scale;

      const int query = first_row + Traits::Scores::row_of(i);
      if (query >= coords.sq) continue;
      store_row(query_row(out_g, params.out, coords, query), softmax.acc[i], normaliser);
      if (lse_g != nullptr && Grid::column_lane() == 0) {
        const float lse = total == 0.f ? -kInfinity : (top + lg2_approx(total)) * kLn2;
        *query_row(lse_g, params.lse, coords, query) = lse;
      }
    }
  }

  // The sums of a part of the keys, as they are.
  template <typename Part>
  __device__ __forceinline__ void store_sums(const typename Traits::Softmax& softmax, const Part& part) const {
    const float scale = Traits::kDropout ? params.scores.keep_scale : 1.f;
#pragma unroll
    for (int i = 0; i < Traits::kRows; i++) {
      const float l = Grid::template reduce_row<Sum>(softmax.l[i]);
      const int query = first_row + Traits::Scores::row_of(i);
      if (query >= coords.sq) continue;
      const int64 row = part.row(coords, query);
      store_row(part.out_g + row * Traits::kHeadDimV, softmax.acc[i], scale);
      if (Grid::column_lane() == 0) part.sums_g[row] = make_float2(softmax.m[i], l);
    }
  }

 private:
  // The thread's columns of a row, from quad kQuad on.
  template <int kQuad = 0, typename Item>
  __device__ __forceinline__ static void store_row(Item* row_g, const float (&acc)[Columns::kItems], float normaliser) {
    const int lane = Grid::column_lane();
    if constexpr (kQuad < Columns::kQuads) {
      store_columns<kQuadItems, kQuad * kQuadItems>(row_g, (lane + kQuad * Columns::kColumnLanes) * kQuadItems, acc,
                                                    normaliser);
      store_row<kQuad + 1>(row_g, acc, normaliser);
    } else if constexpr (Columns::kTail > 0) {
      store_columns<Columns::kTail, kQuad * kQuadItems>(row_g, Columns::kTailAt + lane * Columns::kTail, acc,
                                                        normaliser);
    }
  }

  // Columns col to col + kItems - 1 of a row: acc[kFirst] and what follows.
  template <int kItems, int kFirst, typename Item>
  __device__ __forceinline__ static void store_columns(Item* row_g, int col, const float (&acc)[Columns::kItems],
                                                       float normaliser) {
    float values[kItems];
#pragma unroll
    for (int i = 0; i < kItems; i++) values[i] = acc[kFirst + i] * normaliser;
    if (Traits::kVec == kQuadItems) {
      if (Columns::kWhole || col < Traits::kHeadDimV) store_vec(row_g + col, values);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; i++) {
        if (col + i < Traits::kHeadDimV) row_g[col + i] = from_float<Item>(values[i]);
      }
    }
  }
};
