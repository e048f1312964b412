// How tensor cores take what caches keep (../stored_items.cuh): products with integers are scaled, not the integers.
//
// 8 items are a unit. With float16 queries, bits of an integer in the low bits of a float16 are that many 2^-24, and a
// byte above 0x6400 counts from 1024: one logical operation makes two numbers, where a conversion would take Turing's
// slowest pipe one by one. K is taken in the first form. Its items are too large by kBias, for which a product is set
// right where it starts. V's sums run over all keys, and lose to rounding by what they are too large: by 128 of int8
// that would show. So its V is taken in the second form and 1024 + kBias subtracted, which is exact. By 8 of 4 bits it
// does not: that V is taken as K is, and a sum of the weights sets its sums right at the end. A nibble may be one
// nibble too high; then its products count 16 times (kOdd).
//
// With bfloat16 queries (sm_80 or later) integers become bfloat16, exactly: its subnormal numbers are too small for
// products, and it has 8 significant bits. Seven bits below 0x4300 count from 128; int8's own sign bit is then 128 of
// the same, or an exponent one higher, and is subtracted. Nothing is too large, and weights need no unit of their own.
#pragma once

#include "../../common/pack.cuh"
#include "../stored_items.cuh"

__device__ __forceinline__ uint32 low_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ uint32 high_halves(uint32 x, uint32 y) { return __byte_perm(x, y, 0x7632); }

// Two float16 less 1024 + bias each.
template <int kBias>
__device__ __forceinline__ uint32 without_bias(uint32 halves) {
  constexpr uint32 kAbove = 0x6400u + kBias;  // of a float16 from 1024 on a unit is one bit
  const __half2 less = __hsub2(*reinterpret_cast<const __half2*>(&halves), __half2half2(__ushort_as_half(kAbove)));
  return *reinterpret_cast<const uint32*>(&less);
}

// The way of a format to tensor cores:
//   queries   8 items of q as they meet what keys gives: each word two items of one step of k
//   keys      8 items of a row of K, the words of odd numbers times 1 / kOdd; all times 1 / kKeyUnit, plus kBias
//   values    8 columns of two rows of V: word x has both rows' items of column x, those of odd columns times 1 / kOdd;
//             all times 1 / kValueUnit, plus kValueBias
// kOperand is a constant of these that the kernel keeps in a register: an instruction holds only one other. With kUnits
// weights times scales count in units of the largest scale so far.
template <typename Item, typename Scalar>
struct CacheFormat : StoredFormat<Item> {
  static constexpr bool kUnits = false;
  static constexpr int kBias = 0, kValueBias = 0;
  static constexpr uint32 kOperand = 0;
  static constexpr float kKeyUnit = 1.f, kValueUnit = 1.f, kOdd = 1.f;

  __device__ __forceinline__ static void queries(uint32 (&)[4]) {}
  __device__ __forceinline__ static void keys(uint32 (&halves)[4], const uint32* words, uint32) {
#pragma unroll
    for (int x = 0; x < 4; x++) halves[x] = words[x];
  }
  __device__ __forceinline__ static void values(uint32 (&halves)[8], const uint32* first, const uint32* second,
                                                uint32) {
#pragma unroll
    for (int x = 0; x < 4; x++) {
      halves[2 * x] = low_halves(first[x], second[x]);
      halves[2 * x + 1] = high_halves(first[x], second[x]);
    }
  }
};

// What both dtypes of queries have: bytes 0 and 2 of a word, then 1 and 3.
struct ByteQueries : StoredFormat<int8> {
  __device__ __forceinline__ static void queries(uint32 (&q)[4]) {
#pragma unroll
    for (int x = 0; x < 4; x += 2) {
      const uint32 first = q[x], second = q[x + 1];
      q[x] = low_halves(first, second);
      q[x + 1] = high_halves(first, second);
    }
  }
};

// Nibbles 0 and 4 of a word, 1 and 5, 2 and 6, 3 and 7.
struct NibbleQueries : StoredFormat<uint8> {
  __device__ __forceinline__ static void queries(uint32 (&q)[4]) {
    const uint32 items[4] = {q[0], q[1], q[2], q[3]};
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const uint32 first = items[x / 2], second = items[2 + x / 2];
      q[x] = x % 2 == 0 ? low_halves(first, second) : high_halves(first, second);
    }
  }
};

template <>
struct CacheFormat<int8, float16> : ByteQueries {
  static constexpr bool kUnits = true;
  static constexpr int kBias = 128, kValueBias = 0;
  static constexpr uint32 kOperand = 0x00ff00ffu;
  static constexpr float kKeyUnit = 16777216.f, kValueUnit = 1.f, kOdd = 1.f;

  __device__ __forceinline__ static void keys(uint32 (&halves)[4], const uint32* words, uint32 low_bytes) {
#pragma unroll
    for (int x = 0; x < 4; x++) halves[x] = (words[x / 2] >> 8 * (x % 2) & low_bytes) ^ 0x00800080u;
  }
  __device__ __forceinline__ static void values(uint32 (&halves)[8], const uint32* first, const uint32* second,
                                                uint32 low_bytes) {
#pragma unroll
    for (int x = 0; x < 8; x += 2) {
      const uint32 a = first[x / 4], b = second[x / 4];
      const uint32 pairs = x % 4 == 0 ? low_halves(a, b) : high_halves(a, b);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        halves[x + odd] = without_bias<kBias>((pairs >> 8 * odd & low_bytes) ^ 0x64806480u);
      }
    }
  }
};

template <>
struct CacheFormat<uint8, float16> : NibbleQueries {
  static constexpr bool kUnits = true;
  static constexpr int kBias = 8, kValueBias = kBias;
  static constexpr uint32 kOperand = 0;
  static constexpr float kKeyUnit = 16777216.f, kValueUnit = kKeyUnit, kOdd = 1.f / 16.f;

  __device__ __forceinline__ static void keys(uint32 (&halves)[4], const uint32* words, uint32) {
#pragma unroll
    for (int x = 0; x < 4; x++) halves[x] = words[0] >> 8 * (x / 2) & nibbles(x);
  }
  __device__ __forceinline__ static void values(uint32 (&halves)[8], const uint32* first, const uint32* second,
                                                uint32) {
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const uint32 pairs = x < 4 ? low_halves(first[0], second[0]) : high_halves(first[0], second[0]);
      halves[x] = pairs >> 8 * (x / 2 % 2) & nibbles(x);
    }
  }

 private:
  __device__ __forceinline__ static uint32 nibbles(int x) { return x % 2 == 0 ? 0x000f000fu : 0x00f000f0u; }
};

#ifdef BFLOAT16
constexpr uint32 kBfloat128 = 0x43004300u;  // two bfloat16 of 128, in which a unit is one bit

template <>
struct CacheFormat<int8, bfloat16> : ByteQueries {
  static constexpr bool kUnits = false;
  static constexpr int kBias = 0, kValueBias = 0;
  static constexpr uint32 kOperand = kBfloat128;
  static constexpr float kKeyUnit = 1.f, kValueUnit = 1.f, kOdd = 1.f;

  __device__ __forceinline__ static void keys(uint32 (&pairs)[4], const uint32* words, uint32 from_128) {
#pragma unroll
    for (int x = 0; x < 4; x++) pairs[x] = integers(words[x / 2] >> 8 * (x % 2), from_128);
  }
  __device__ __forceinline__ static void values(uint32 (&pairs)[8], const uint32* first, const uint32* second,
                                                uint32 from_128) {
#pragma unroll
    for (int x = 0; x < 8; x += 2) {
      const uint32 a = first[x / 4], b = second[x / 4];
      const uint32 both = x % 4 == 0 ? low_halves(a, b) : high_halves(a, b);
      pairs[x] = integers(both, from_128);
      pairs[x + 1] = integers(both >> 8, from_128);
    }
  }

 private:
  // Of bytes 0 and 2: 128 plus seven bits, less 128 or 256.
  __device__ __forceinline__ static uint32 integers(uint32 bytes, uint32 from_128) {
    constexpr uint32 kMinusOne = 0xbf80bf80u;
    return fma_bf16x2((bytes & 0x00800080u) | from_128, kMinusOne, (bytes & 0x007f007fu) | from_128);
  }
};

template <>
struct CacheFormat<uint8, bfloat16> : NibbleQueries {
  static constexpr bool kUnits = false;
  static constexpr int kBias = 0, kValueBias = 0;
  static constexpr uint32 kOperand = kBfloat128;
  static constexpr float kKeyUnit = 1.f, kValueUnit = 1.f, kOdd = 1.f;

  __device__ __forceinline__ static void keys(uint32 (&pairs)[4], const uint32* words, uint32 from_128) {
#pragma unroll
    for (int x = 0; x < 4; x++) pairs[x] = integers(words[0] >> 4 * x, from_128);
  }
  __device__ __forceinline__ static void values(uint32 (&pairs)[8], const uint32* first, const uint32* second,
                                                uint32 from_128) {
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const uint32 both = x < 4 ? low_halves(first[0], second[0]) : high_halves(first[0], second[0]);
      pairs[x] = integers(both >> 4 * (x % 4), from_128);
    }
  }

 private:
  // Of nibbles 0 and 4, to which 8 was added: less 136.
  __device__ __forceinline__ static uint32 integers(uint32 nibbles, uint32 from_128) {
    constexpr uint32 kOne = 0x3f803f80u, kMinus136 = 0xc308c308u;
    return fma_bf16x2((nibbles & 0x000f000fu) | from_128, kOne, kMinus136);
  }
};
#endif

// A lane's view of a tile: rows from its first on, from its first item on, and scales from that of its first key
// on.
template <typename Item>
struct CacheTile {
  const Item* lane_g;
  int64 row_stride;
  const float* scales_g;
  int64 scale_stride;

  __device__ __forceinline__ const Item* row(int after) const { return lane_g + after * row_stride; }
  __device__ __forceinline__ float scale(int after) const { return __ldg(scales_g + after * scale_stride); }
};
