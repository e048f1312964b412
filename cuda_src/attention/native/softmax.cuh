// The online softmax of a warp's rows from sm_80 on, where a conversion packs two numbers: as tensor_core/softmax.cuh
// keeps a stale maximum, without its exponent shift, for float16 and bfloat16.
//
// A row's maximum is that of an earlier tile while P of it keeps below 2^kMostLog2. Two ways to know:
// - kBefore: a thread compares its largest score of the tile before the exponentials.
// - kAfter: P is clamped as it is packed, and a thread's sum of the tile's P, which is not, reports after P V whether
//   anything was clamped. What the clamp took is then added (`take_back`). So the exponentials and P V share a basic
//   block, which ptxas interleaves.
//
// The arithmetic is that of Milakov and Gimelshein, arXiv:1805.02867; what a P loses is in the bound
// (cupyattn/ops/attention/bounds.py: flush).
#pragma once

#include "../../common/pack.cuh"
#include "../../common/reduce.cuh"
#include "../tensor_core/score_tile.cuh"

enum class Check { kBefore, kAfter };

// What a tile's scores lack of those that maxima are kept of: nothing, or a number of each row, in log2.
struct NoShift {
  __device__ __forceinline__ static constexpr float from(float m, int, int) { return m; }
  __device__ __forceinline__ static constexpr float rounded_up(float log2, int, int) { return log2; }
};
template <int kMTiles>
struct RowShift {
  float of[kMTiles][2];

  __device__ __forceinline__ float from(float m, int i, int half) const { return m - of[i][half]; }
  __device__ __forceinline__ float rounded_up(float log2, int i, int half) const {
    return __fadd_ru(log2, of[i][half]);
  }
};

// The range of P, by the dtype that a tensor core reads: P = 1 at the stale maximum is stored as 2^kHeadroomLog2, and
// the largest that pack_clamped leaves is kLargest.
template <typename Scalar>
struct WeightRange;
template <>
struct WeightRange<float16> {
  static constexpr float kHeadroomLog2 = 9.f;  // of what float16 has above 1; small P keep as much below
  static constexpr float kMostLog2 = 15.9f;
  static constexpr float kLargest = 65504.f;
};
#ifdef BFLOAT16
template <>
struct WeightRange<bfloat16> {
  static constexpr float kHeadroomLog2 = 0.f;
  static constexpr float kMostLog2 = 15.9f;  // more would take from V what P V has of float32's range
  static constexpr float kLargest = 65536.f;
};
#endif

template <typename Scalar_, int kMTiles, int kOutTiles>
struct NativeSoftmax {
  using Scalar = Scalar_;
  using Range = WeightRange<Scalar>;
  static constexpr float kNoMaximum = -1e30f;  // no key seen: finite, so that differences are never NaN

  static constexpr float kHeadroomLog2 = Range::kHeadroomLog2;
  // How P and its sums are kept, for the epilogue.
  __device__ __forceinline__ static constexpr float headroom_log2() { return kHeadroomLog2; }
  __device__ __forceinline__ static constexpr float shift_log2() { return kHeadroomLog2; }
  __device__ __forceinline__ static constexpr float unshift() { return 1.f; }

  float acc[kMTiles][kOutTiles][4];  // P V, times 2^kHeadroomLog2
  float m[kMTiles][2];               // the stale maximum in log2, minus kHeadroomLog2
  float l[kMTiles][2];               // this thread's part of the row's sum of P

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

  // P = 2^(scale * score - m), packed; `sum` is this thread's part of the tile's row sums.
  template <bool kClamped, typename Shift, int kNTiles>
  __device__ __forceinline__ void exponentiate(uint32 (&p)[kNTiles][kMTiles][2], float (&sum)[kMTiles][2],
                                               const float (&s)[kNTiles][kMTiles][4], float scale,
                                               const Shift& shift) const {
    float of_m[kMTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sum[i][half] = 0.f;
        of_m[i][half] = shift.from(m[i][half], i, half);
      }
    }
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float x = weight(s[n][i][2 * half], scale, of_m[i][half]);
          const float y = weight(s[n][i][2 * half + 1], scale, of_m[i][half]);
          sum[i][half] += x;
          sum[i][half] += y;
          p[n][i][half] = pack<kClamped>(x, y);
        }
      }
    }
  }

  // Raise each row's maximum to cover the tile, and rescale what was accumulated; unless in all rows of the warp the
  // tile's P fit already, or `always`. `scale` is not negative.
  template <typename Shift, int kNTiles>
  __device__ __forceinline__ void raise(const float (&s)[kNTiles][kMTiles][4], float scale, const Shift& shift,
                                        bool always = false) {
    float largest[kMTiles][2];  // of this thread's scores
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        largest[i][half] = -kInfinity;
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
          largest[i][half] = fmaxf(largest[i][half], fmaxf(s[n][i][2 * half], s[n][i][2 * half + 1]));
        }
        fits = fits && __fmaf_rn(largest[i][half], scale, -shift.from(m[i][half], i, half)) <= Range::kMostLog2;
      }
    }
    if (!always && __all_sync(kFullWarp, fits)) return;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float old_m = m[i][half];
        // Rounded up: of a maximum of -1e10 the rounding is hundreds, and below it P would overflow.
        const float top = shift.rounded_up(__fmaf_ru(largest[i][half], scale, -kHeadroomLog2), i, half);
        m[i][half] = fmaxf(old_m, warp_reduce<Max, 4>(top));
        const float shrink = ex2_approx(old_m - m[i][half]);
        l[i][half] *= shrink;
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

  // Any row of the warp of which P may have been clamped, or is NaN.
  __device__ __forceinline__ static bool overflows(const float (&sum)[kMTiles][2]) {
    bool fits = true;
#pragma unroll
    for (int i = 0; i < kMTiles; i++) fits = fits && sum[i][0] <= Range::kLargest && sum[i][1] <= Range::kLargest;
    return !__all_sync(kFullWarp, fits);
  }

  // After P V of clamped P: raise the maximum, add the tile's sums, and return in `p` what the clamp took.
  template <typename Shift, int kNTiles>
  __device__ __forceinline__ void take_back(uint32 (&p)[kNTiles][kMTiles][2], const float (&s)[kNTiles][kMTiles][4],
                                            float scale, const Shift& shift) {
    float old_m[kMTiles][2];
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      old_m[i][0] = m[i][0];
      old_m[i][1] = m[i][1];
    }
    raise(s, scale, shift, /*always=*/true);
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float clamped = Range::kLargest * ex2_approx(old_m[i][half] - m[i][half]);
        const float old_of_m = shift.from(old_m[i][half], i, half), of_m = shift.from(m[i][half], i, half);
#pragma unroll
        for (int n = 0; n < kNTiles; n++) {
          float taken[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float score = s[n][i][2 * half + e], x = weight(score, scale, of_m);
            l[i][half] += x;
            taken[e] = weight(score, scale, old_of_m) > Range::kLargest ? x - clamped : 0.f;
          }
          p[n][i][half] = pack<false>(taken[0], taken[1]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static float weight(float score, float scale, float of_m) {
    return ex2_approx(__fmaf_rn(score, scale, -of_m));
  }

  // With float16 the clamp is part of the conversion.
  template <bool kClamped>
  __device__ __forceinline__ static uint32 pack(float x, float y) {
    if constexpr (kClamped || kHeadroomLog2 > 0.f) return pack_clamped<Scalar>(x, y);
    return pack_pair<Scalar>(x, y);
  }
};
