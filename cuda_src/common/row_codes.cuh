// Rows in int8 with one scale each, and the rotation of their blocks of 64 neighbouring items.
//
//   rotated   v = x H, a block of 64 at a time, with H Sylvester's Hadamard matrix:
//             v_j = sum_i (-1)^popcount(i & j) x_i (H H = 64, so the orthogonal rotation is v / 8); otherwise v = x
//   absmax = max_i |v_i|,   scale = absmax / 127 (rotated: absmax / (8 127)),   q_i = round(v_i (127 / absmax))
//
// Every operation is float32, correctly rounded, and subnormal results are 0: codes and scales equal NumPy's. H is six
// stages of sums and differences, of items 1, 2, 4, 8, 16 and 32 apart in this order. round() is to nearest even.
// A row whose absmax is below 2^-100 has scale 0 and codes 0. A row with an infinity or a NaN, or one whose rotation
// overflows, has scale NaN and codes 0.
#pragma once

#include "memory.cuh"
#include "pack.cuh"
#include "reduce.cuh"

constexpr int kRotation = 64;

// Rotate blocks that lie in kRotation / kItems neighbouring lanes, kItems items each. All lanes of the warp call it.
template <int kItems>
__device__ __forceinline__ void rotate_blocks(float (&v)[kItems]) {
  static_assert(kItems >= 2 && kRotation / kItems <= kWarpSize && (kItems & (kItems - 1)) == 0, "in lanes of one warp");
#pragma unroll
  for (int distance = 1; distance < kItems; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (i & distance) continue;
      const float a = v[i], b = v[i + distance];
      v[i] = a + b;
      v[i + distance] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kRotation / kItems; distance *= 2) {
    const float sign = lane_index() & distance ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kItems; i++) v[i] = __fmaf_rn(sign, v[i], __shfl_xor_sync(kFullWarp, v[i], distance));
  }
}

// The maximum of absolute values as bits, in the order of integers: NaN is above infinity, and is not lost.
struct MaxBits {
  static constexpr uint32 kIdentity = 0;
  __device__ __forceinline__ uint32 operator()(uint32 a, uint32 b) const { return max(a, b); }
};

template <int kItems>
__device__ __forceinline__ uint32 max_bits(uint32 most, const float (&v)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
  return most;
}

constexpr float kLeastScale = 0x1p-126f;  // of a key; float32's least normal number

// The scale of a row, and the codes of its items.
struct RowCodes {
  float scale, factor;
  bool coded;  // otherwise all codes are 0

  template <bool kRotated>
  __device__ __forceinline__ static RowCodes of(uint32 absmax_bits) {
    constexpr float kLeast = 0x1p-100f, kSteps = kRotated ? 8.f * 127.f : 127.f;
    const float absmax = __uint_as_float(absmax_bits);
    if (absmax < kLeast) return {0.f, 0.f, false};
    if (!(absmax < kInfinity)) return {kNaN, 0.f, false};
    return {__fdiv_rn(absmax, kSteps), __fdiv_rn(127.f, absmax), true};
  }

  // Of keys of attention: not rotated, and no scale is 0.
  __device__ __forceinline__ static RowCodes of_key(uint32 absmax_bits) {
    RowCodes codes = of<false>(absmax_bits);
    if (codes.scale < kLeastScale) codes.scale = kLeastScale;  // a NaN stays
    return codes;
  }

  // The lowest byte of v factor + 1.5 2^23 is the nearest integer's, and the sum rounds to even.
  __device__ __forceinline__ uint32 code(float v) const {
    return coded ? __float_as_uint(__fadd_rn(__fmul_rn(v, factor), 0x1.8p23f)) : 0;
  }

  // Four neighbouring codes, the first in the lowest byte.
  __device__ __forceinline__ uint32 word(const float* v) const {
    return prmt(prmt(code(v[0]), code(v[1]), 0x0040), prmt(code(v[2]), code(v[3]), 0x0040), 0x5410);
  }

  // Store neighbouring codes; their address is a multiple of their bytes.
  template <int kItems>
  __device__ __forceinline__ void store(signed char* target_g, const float (&v)[kItems]) const {
    static_assert(kItems == 4 || kItems == 8, "a word or two");
    if constexpr (kItems == 8) {
      st_global_v2(target_g, make_uint2(word(v), word(v + 4)));
    } else {
      *reinterpret_cast<uint32*>(target_g) = word(v);
    }
  }
};
