// The online softmax (Milakov and Gimelshein, arXiv:1805.02867) of a warp's rows in plain registers (score_tile.cuh),
// in float32 throughout.
//
// Stale maximum: float32 holds P = 2^(s - m) as exactly for an m that is not the maximum, so a row keeps the m of an
// earlier tile while its scores stay below 2^kHeadroomLog2 times it. Each thread compares its own scores; only where
// one rises higher are maxima exchanged between lanes and what was accumulated rescaled. Row sums stay per thread until
// the end.
#pragma once

#include "../../common/reduce.cuh"
#include "score_tile.cuh"

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
