// The online softmax of a warp's rows on tensor-core fragments: no maximum, no shuffle and no conversion in the
// common case.
//
// - Stale maximum. A row keeps the maximum of an earlier tile while nothing overflows: P carries 2^kHeadroomLog2 of
//   what float16 could hold, and a thread's sum of the tile's P tells whether any exceeds it. Only then is the
//   maximum raised, and what was accumulated rescaled. (Masked tiles, where rows see their first keys, look at the
//   scores.)
// - Exponent shift. P is kept times 2^-112 in float32, and packed without a conversion (pack_shifted). A bfloat16 P has
//   the exponents of float32, and one instruction packs two: it has neither shift nor headroom.
// - Row sums stay per thread until the end.
//
// The arithmetic is that of Milakov and Gimelshein, arXiv:1805.02867; what a float16 P loses is in the bound
// (cupyattn/ops/attention/bounds.py: flush).
#pragma once

#include "../../common/pack.cuh"
#include "../../common/reduce.cuh"
#include "score_tile.cuh"

constexpr float kHeadroomLog2 = 9.f;                 // P = 1 at the stale maximum is stored as 2^9
constexpr float kSpareLog2 = 2.99f;                  // sixteen of 2^2.99 above it add up to what fits float16
constexpr float kShiftLog2 = kHeadroomLog2 - 112.f;  // and held in float32 as 2^(9 - 112)
constexpr float kLargestPacked = 1.2616483e-29f;     // 65504 * 2^-112, rounded down
constexpr float kUnshift = 5.192296858534828e33f;    // 2^112
constexpr float kNoMaximum = -1e30f;                 // no key seen: finite, so that differences are never NaN

// How P is kept for tensor cores: the constants above, or those of bfloat16.
template <typename Scalar>
struct PackedRange;

template <>
struct PackedRange<float16> {
  __device__ static constexpr float headroom_log2() { return kHeadroomLog2; }
  __device__ static constexpr float shift_log2() { return kShiftLog2; }
  __device__ static constexpr float spare_log2() { return kSpareLog2; }
  __device__ static constexpr float largest_packed() { return kLargestPacked; }
  __device__ static constexpr float unshift() { return kUnshift; }
  __device__ __forceinline__ static uint32 pack(float x, float y) { return pack_shifted(x, y); }
};

#ifdef BFLOAT16
// P exceeds the stale maximum by no more than a float16 may: sums over all keys are less than 2^7 sum |v|.
template <>
struct PackedRange<bfloat16> {
  __device__ static constexpr float headroom_log2() { return 0.f; }
  __device__ static constexpr float shift_log2() { return 0.f; }
  __device__ static constexpr float spare_log2() { return kSpareLog2; }
  __device__ static constexpr float largest_packed() { return 128.f; }
  __device__ static constexpr float unshift() { return 1.f; }
  __device__ __forceinline__ static uint32 pack(float x, float y) { return pack_pair<bfloat16>(x, y); }
};
#endif

struct Nothing {
  __device__ __forceinline__ void operator()(int, int, float) const {}
};

template <int kMTiles, int kOutTiles, typename Scalar = float16, typename Range_ = PackedRange<Scalar>>
struct Softmax {
  using Range = Range_;

  // How P and its sums are kept, for the epilogue.
  __device__ __forceinline__ static constexpr float headroom_log2() { return Range::headroom_log2(); }
  __device__ __forceinline__ static constexpr float shift_log2() { return Range::shift_log2(); }
  __device__ __forceinline__ static constexpr float unshift() { return Range::unshift(); }

  float acc[kMTiles][kOutTiles][4];  // P V, times 2^kHeadroomLog2
  float m[kMTiles][2];               // the stale maximum in log2, minus kShiftLog2
  float l[kMTiles][2];               // this thread's part of the row's sum of P, shifted

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      m[i][0] = m[i][1] = kNoMaximum;
      l[i][0] = l[i][1] = 0.f;
#pragma unroll
      for (int n = 0; n < kOutTiles; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[i][n][e] = 0.f;
      }
    }
  }

  // Move l to separate registers. ptxas spills what the masked loop has no room for, and would reload and spill it in
  // the main loop too, which has.
  __device__ __forceinline__ void renew() {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      l[i][0] = kept_in_register(l[i][0]);
      l[i][1] = kept_in_register(l[i][1]);
    }
  }

  // P = 2^(scale * score - m), packed; `sum` is this thread's part of the tile's row sums.
  template <int kNTiles>
  __device__ __forceinline__ void exponentiate(uint32 (&p)[kNTiles][kMTiles][2], float (&sum)[kMTiles][2],
                                               const float (&s)[kNTiles][kMTiles][4], float scale) const {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sum[i][half] = 0.f;
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
          const float x = ex2_approx(__fmaf_rn(s[n][i][2 * half], scale, -m[i][half]));
          const float y = ex2_approx(__fmaf_rn(s[n][i][2 * half + 1], scale, -m[i][half]));
          sum[i][half] += x;
          sum[i][half] += y;
          p[n][i][half] = Range::pack(x, y);
        }
      }
    }
  }

  // Raise each row's maximum to cover the tile, and rescale what was accumulated; unless in all rows of the warp the
  // tile's P and a thread's sum of them fit already. `also` rescales what else a caller has of row (i, half).
  template <int kNTiles, typename Also = Nothing>
  __device__ __forceinline__ void raise(const float (&s)[kNTiles][kMTiles][4], const Also& also = {}) {
    static_assert(kNTiles <= 8, "a thread holds up to sixteen scores of a row");
    float top[kMTiles][2];  // of this thread's scores
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float largest = -kInfinity;
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
          largest = fmaxf(largest, fmaxf(s[n][i][2 * half], s[n][i][2 * half + 1]));
        }
        // Rounded up: of a maximum of -1e10 the rounding is hundreds, and below it P would overflow.
        top[i][half] = __fmaf_ru(largest, kLog2E, -Range::shift_log2());
        fits = fits && top[i][half] - m[i][half] <= Range::spare_log2();
      }
    }
    if (__all_sync(kFullWarp, fits)) return;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float old_m = m[i][half];
        m[i][half] = fmaxf(old_m, warp_reduce<Max, 4>(top[i][half]));
        const float shrink = ex2_approx(old_m - m[i][half]);
        l[i][half] *= shrink;
        also(i, half, shrink);
#pragma unroll
        for (int n = 0; n < kOutTiles; n++) {
          acc[i][n][2 * half] *= shrink;
          acc[i][n][2 * half + 1] *= shrink;
        }
      }
    }
  }

  __device__ __forceinline__ void add(const float (&sum)[kMTiles][2]) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      l[i][0] += sum[i][0];
      l[i][1] += sum[i][1];
    }
  }

  // Any row of the warp whose P no longer fits, or is NaN.
  __device__ __forceinline__ static bool overflows(const float (&sum)[kMTiles][2]) {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      fits = fits && sum[i][0] <= Range::largest_packed() && sum[i][1] <= Range::largest_packed();
    }
    return __any_sync(kFullWarp, !fits);
  }
};

// The same for one row a thread, of which four lanes hold the scores; what was accumulated is elsewhere.
template <typename Scalar>
struct RowSoftmax {
  using Range = PackedRange<Scalar>;

  __device__ __forceinline__ static constexpr float headroom_log2() { return Range::headroom_log2(); }
  __device__ __forceinline__ static constexpr float shift_log2() { return Range::shift_log2(); }
  __device__ __forceinline__ static constexpr float unshift() { return Range::unshift(); }

  float m = kNoMaximum;  // the stale maximum in log2, minus kShiftLog2
  float l = 0.f;         // this thread's part of the row's sum of P, shifted

  // P = 2^(scale * score - m), packed; return this thread's part of the tile's row sum.
  template <int kNTiles>
  __device__ __forceinline__ float exponentiate(uint32 (&p)[kNTiles][1][1], const float (&s)[kNTiles][1][2],
                                                float scale) const {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
      const float x = ex2_approx(__fmaf_rn(s[n][0][0], scale, -m)), y = ex2_approx(__fmaf_rn(s[n][0][1], scale, -m));
      sum += x;
      sum += y;
      p[n][0][0] = Range::pack(x, y);
    }
    return sum;
  }

  // Raise each row's maximum to cover the tile, unless in all rows of the warp the tile's P and a thread's sum of them
  // fit already. Return the factor of what was accumulated.
  template <int kNTiles>
  __device__ __forceinline__ float raise(const float (&s)[kNTiles][1][2]) {
    static_assert(kNTiles <= 8, "a thread holds up to sixteen scores of a row");
    float largest = -kInfinity;
#pragma unroll
    for (int n = 0; n < kNTiles; n++) largest = fmaxf(largest, fmaxf(s[n][0][0], s[n][0][1]));
    const float top = __fmaf_ru(largest, kLog2E, -Range::shift_log2());  // rounded up as above
    if (__all_sync(kFullWarp, top - m <= kSpareLog2)) return 1.f;
    const float old_m = m;
    m = fmaxf(old_m, warp_reduce<Max, 4>(top));
    const float shrink = ex2_approx(old_m - m);
    l *= shrink;
    return shrink;
  }

  __device__ __forceinline__ void add(float sum) { l += sum; }

  // Any row of the warp whose P no longer fits, or is NaN.
  __device__ __forceinline__ static bool overflows(float sum) {
    return __any_sync(kFullWarp, !(sum <= Range::largest_packed()));
  }
};
