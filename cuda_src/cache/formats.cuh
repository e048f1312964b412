// Storage formats of a cache's items: floats (float16, bfloat16, float32), or integers with a scale for each token and
// key-value head.
//
//   Int8   value = q * scale,            scale = max|x| / 127,  q = round(x / scale), a signed byte
//   Int4   value = (nibble - 8) * scale, scale = max|x| / 7,    nibble = 8 + round(x / scale), item 2 i in the low
//          nibble of byte i, item 2 i + 1 in the high one
//
// Rounding is to nearest even. A scale that would be subnormal is flushed to 0, and its integers are 0. Items that are
// not all finite have a scale that is not finite, and integers of 0: they are read back as NaN.
#pragma once

#include "../common/vec.cuh"

using uint8 = unsigned char;

struct Int8 {
  static constexpr int kBits = 8;
  static constexpr int kOffset = 0;
  static constexpr float kLargest = 127.f;
};
struct Int4 {
  static constexpr int kBits = 4;
  static constexpr int kOffset = 8;
  static constexpr float kLargest = 7.f;
};

template <typename Cache>
struct Format {
  static constexpr bool kQuantised = false;
  static constexpr int kPerByte = 1;  // items, at least one
  using Item = Cache;                 // of the array
};
template <>
struct Format<Int8> {
  static constexpr bool kQuantised = true;
  static constexpr int kPerByte = 1;
  using Item = uint8;
};
template <>
struct Format<Int4> {
  static constexpr bool kQuantised = true;
  static constexpr int kPerByte = 2;
  using Item = uint8;
};

// Position of an item in its row, in items of the array.
template <typename Cache>
__device__ __forceinline__ uint32 stored_column(uint32 column) {
  if constexpr (Format<Cache>::kQuantised) {
    return column * Cache::kBits / 8;
  } else {
    return column;
  }
}

// The scale of a head whose largest item has these bits, without the sign. As integers NaN is above infinity, and that
// above all else.
template <typename Quantised>
__device__ __forceinline__ float scale_of(uint32 largest_bits) {
  return __fdiv_rn(__uint_as_float(largest_bits), Quantised::kLargest);
}

// x / scale, correctly rounded, of many x: the reciprocal is taken once. With y = 1 / m rounded to nearest, q = x y and
// two times q = q + (x - m q) y, whose remainders are exact (Markstein, IBM Journal of Research and Development 34,
// 1990). A power of two brings m to [1, 2) first, far from overflow and from subnormal numbers; what it flushes to 0
// is rounded to 0.
struct Divisor {
  float power, m, reciprocal;

  // Of a scale that is 0 or not finite m is so too, and every quotient is NaN.
  __device__ __forceinline__ explicit Divisor(float scale)
      : power(__uint_as_float(0x7f000000u - (__float_as_uint(scale) & 0x7f800000u))),
        m(scale * power),
        reciprocal(__frcp_rn(m)) {}

  __device__ __forceinline__ float quotient(float x) const {
    const float scaled = x * power;
    const float first = scaled * reciprocal;
    const float second = __fmaf_rn(__fmaf_rn(-m, first, scaled), reciprocal, first);
    return __fmaf_rn(__fmaf_rn(-m, second, scaled), reciprocal, second);
  }
};

// kItems neighbouring items as integers, the first in the lowest bits. A quotient is at most kLargest, and a NaN is
// converted to 0.
template <typename Quantised, int kItems>
struct Packed {
  static constexpr int kBytes = kItems * Quantised::kBits / 8;
  static constexpr int kWords = div_up(kBytes, 4);
  uint32 word[kWords];

  __device__ __forceinline__ Packed(const float (&x)[kItems], const Divisor& divisor) : word() {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      constexpr uint32 kMask = (1u << Quantised::kBits) - 1;
      const int bit = i * Quantised::kBits;
      const uint32 q = static_cast<uint32>(__float2int_rn(divisor.quotient(x[i])) + Quantised::kOffset);
      word[bit / 32] |= (q & kMask) << bit % 32;
    }
  }

  __device__ __forceinline__ void store(uint8* target) const {
    if constexpr (kBytes == 8) {
      st_global_v2(target, make_uint2(word[0], word[1]));
    } else {
      using Type = typename Word<kBytes>::Type;
      *reinterpret_cast<Type*>(target) = static_cast<Type>(word[0]);
    }
  }
};

// kItems neighbouring items of a head, as they are stored, from `column` on.
template <typename Quantised, int kItems>
struct Unpacked {
  static constexpr int kBits = Quantised::kBits;
  static constexpr int kBytes = kItems * kBits >= 8 ? kItems * kBits / 8 : 1;
  uint32 word[div_up(kBytes, 4)];

  __device__ __forceinline__ Unpacked(const uint8* head_g, uint32 column) {
    const uint8* source = head_g + stored_column<Quantised>(column);
    if constexpr (kBytes == 8) {
      const uint2 both = ld_global_v2(source);
      word[0] = both.x, word[1] = both.y;
    } else {
      word[0] = *reinterpret_cast<const typename Word<kBytes>::Type*>(source);
      if (kItems * kBits < 8 && column % 2 == 1) word[0] >>= kBits;  // the byte's second item
    }
  }

  __device__ __forceinline__ int integer(int i) const {
    const uint32 lowest = word[i * kBits / 32] >> i * kBits % 32;
    if constexpr (kBits == 8) {
      return static_cast<signed char>(lowest);
    } else {
      return static_cast<int>(lowest & 15u) - Quantised::kOffset;
    }
  }
};
