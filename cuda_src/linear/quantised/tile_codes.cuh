// Eight neighbouring weights of a row from their codes, in float16 or bfloat16 for tensor cores.
//
// Their error is bounded in cupyattn/ops/linear/bounds.py (weight_error). In float16, integers are exact, by placing a
// code in the mantissa of 1024; a product and a sum that follow round once each.
#pragma once

#include "../../common/pack.cuh"
#include "formats.cuh"

constexpr int kRunItems = 16;  // neighbouring weights of a row that a thread fetches at once: of one block

// The codes of a run and the numbers of its block, as they are in memory.
template <typename Format>
struct Run {
  uint32 codes[kRunItems * Format::kBits / 32];
  uint32 scale;
  uint32 above;  // of a super-block: Q4_K alone
};

// A constant as float16, rounded if necessary, twice in a word.
__host__ __device__ constexpr uint32 half_bits(float x) {
  if (x == 0.f) return 0;
  float mantissa = x < 0.f ? -x : x;
  uint32 exponent = 15;
  for (; mantissa >= 2.f; mantissa /= 2.f) exponent++;
  for (; mantissa < 1.f; mantissa *= 2.f) exponent--;
  const uint32 rounded = static_cast<uint32>(mantissa * 1024.f + 0.5f) - 1024;
  return (x < 0.f ? 0x8000u : 0u) + (exponent << 10) + rounded;
}
__host__ __device__ constexpr uint32 both(float x) { return half_bits(x) * 0x10001u; }

// The numbers that decode a block's weights, in both halves of a word: code * scale + shift. minus_whole is added to
// the code 1024 + q first.
struct HalfNumbers {
  uint32 scale, shift, minus_whole;
};

constexpr float kInt8Span = 128.f;  // Int8 has q / 128 and 128 times the scale, which is of the size of a weight

template <typename Format>
struct HalfWeights;

struct WholeCodes {
  static constexpr uint32 kMagic = both(1024.f);  // in its mantissa the lowest bit counts one

  // Of the codes 0 to 7 in a word 0 and 4, 1 and 5, 2 and 6, 3 and 7, without `whole`: exact.
  __device__ __forceinline__ static void integers(uint32 (&pairs)[4], uint32 word, uint32 minus_whole) {
    const uint32 minus_sixteenth = add_f16x2(minus_whole, both(1024.f - 64.f));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32 codes = word >> 8 * i;
      pairs[2 * i] = add_f16x2(codes & 0x000f000fu | kMagic, minus_whole);
      pairs[2 * i + 1] = fma_f16x2(codes & 0x00f000f0u | kMagic, both(1.f / 16.f), minus_sixteenth);
    }
  }

  __device__ __forceinline__ static uint4 eight(const uint32 (&words)[1], const HalfNumbers& numbers) {
    uint32 pairs[4];
    integers(pairs, words[0], numbers.minus_whole);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = fma_f16x2(pairs[i], numbers.scale, numbers.shift);
    return make_uint4(prmt(pairs[0], pairs[1], 0x5410), prmt(pairs[2], pairs[3], 0x5410),
                      prmt(pairs[0], pairs[1], 0x7632), prmt(pairs[2], pairs[3], 0x7632));
  }
};

template <>
struct HalfWeights<Q4_1> : WholeCodes {
  __device__ __forceinline__ static HalfNumbers numbers(const Run<Q4_1>& run) {
    return {prmt(run.scale, 0, 0x1010), prmt(run.scale, 0, 0x3232), both(-1024.f)};
  }
};

// The offset is subtracted: d sc and dmin m are rounded, each once.
template <>
struct HalfWeights<Q4_K> : WholeCodes {
  __device__ __forceinline__ static HalfNumbers numbers(const Run<Q4_K>& run) {
    const uint32 whole = add_f16x2(prmt(run.scale, kMagic, 0x7170), both(-1024.f));
    const uint32 products = mul_f16x2(whole, run.above);
    return {prmt(products, 0, 0x1010), prmt(products, 0, 0x3232) ^ 0x80008000u, both(-1024.f)};
  }
};

// (q - zero) scale as (q - whole) scale + (whole - zero) scale, for the integer nearest to zero: the rounded numbers
// are at most as large as the weight.
template <>
struct HalfWeights<Int4> : WholeCodes {
  __device__ __forceinline__ static HalfNumbers numbers(const Run<Int4>& run) {
    const uint32 scale = prmt(run.scale, 0, 0x1010), minus_zero = prmt(run.scale, 0, 0x3232) ^ 0x80008000u;
    const uint32 minus_whole = add_f16x2(minus_zero, both(-1024.f));
    const uint32 whole = add_f16x2(minus_whole, both(1024.f)) ^ 0x80008000u;
    return {scale, mul_f16x2(add_f16x2(whole, minus_zero), scale), minus_whole};
  }
};

template <>
struct HalfWeights<Int8> {
  __device__ __forceinline__ static HalfNumbers numbers(const Run<Int8>& run) {
    const float scale = __uint_as_float(run.scale) * kInt8Span;
    return {pack_halves(scale, scale), 0, 0};
  }
  __device__ __forceinline__ static uint4 eight(const uint32 (&words)[2], const HalfNumbers& numbers) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32 unsigned_codes = words[i / 2] ^ 0x80808080u;  // q + 128
      const uint32 code = prmt(unsigned_codes, both(1024.f), i % 2 ? 0x7372 : 0x7170);
      const uint32 fraction = fma_f16x2(code, both(1.f / kInt8Span), both(-(1024.f + 128.f) / kInt8Span));
      pairs[i] = mul_f16x2(fraction, numbers.scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// The codebook in registers: the low bytes of its 16 numbers, and the high ones. A PRMT looks up four of eight.
template <>
struct HalfWeights<Nf4> {
  __device__ __forceinline__ static HalfNumbers numbers(const Run<Nf4>& run) {
    const float absmax = __uint_as_float(run.scale);
    return {pack_halves(absmax, absmax), 0, 0};
  }

  // Bytes of four entries of the codebook.
  __host__ __device__ static constexpr uint32 entries(int first, int shift) {
    uint32 bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= (half_bits(kNf4Codebook[first + i]) >> shift & 0xff) << 8 * i;
    return bytes;
  }

  // Of four codes, the lower three bits of each in a digit of `selector`; `upper` has ones in the bytes of those from
  // 8 on.
  template <int kShift>
  __device__ __forceinline__ static uint32 looked_up(uint32 selector, uint32 upper) {
    constexpr uint32 kEntries[4] = {entries(0, kShift), entries(4, kShift), entries(8, kShift), entries(12, kShift)};
    const uint32 below = prmt(kEntries[0], kEntries[1], selector), above = prmt(kEntries[2], kEntries[3], selector);
    return above & upper | below & ~upper;
  }

  // Call each(i, pair) for the pairs of entries of the eight codes of a word.
  template <typename Each>
  __device__ __forceinline__ static void each_pair(uint32 word, const Each& each) {
    const uint32 selectors = word & 0x77777777u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32 selector = selectors >> 16 * i;
      const uint32 upper = prmt(word, word << 4, i ? 0xbfae : 0x9d8c);
      const uint32 low = looked_up<0>(selector, upper), high = looked_up<8>(selector, upper);
      // An even k is in the high nibble of a byte.
      each(2 * i, prmt(low, high, 0x4051));
      each(2 * i + 1, prmt(low, high, 0x6273));
    }
  }

  __device__ __forceinline__ static uint4 eight(const uint32 (&words)[1], const HalfNumbers& numbers) {
    uint32 pairs[4];
    each_pair(words[0], [&](int i, uint32 pair) { pairs[i] = mul_f16x2(pair, numbers.scale); });
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// The numbers that decode a block's weights in float32: code * scale + shift, for the code as eight() makes it.
//
// With bfloat16 a weight is computed in float32, which has the same exponents, and rounded once: float16 would lose
// weights beyond 65504 and below 2^-25. A code is placed in the mantissa of a float whose lowest used bit counts one.
// By way of float16, a product of 8192 x 8192 x 4096 reached 369 TFLOP/s with Nf4 and 376 with Int4, for 365 and 383 in
// this way (an H200, 2026-11-29, medians of 15 calls).
template <typename Format>
struct FloatWeights;

// The code is 128 + q: shift includes -128 scale, and is rounded in float32.
struct FloatCodes {
  static constexpr float kMagic = 128.f;  // of whose bits only the highest byte is not 0, so that a PRMT places a code

  __device__ __forceinline__ static void eight(float (&weights)[8], const uint32 (&words)[1],
                                               const BlockNumbers& numbers) {
    const uint32 codes[2] = {words[0] & 0x0f0f0f0fu, words[0] >> 4 & 0x0f0f0f0fu};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32 code = prmt(codes[i % 2], __builtin_bit_cast(uint32, kMagic), 0x7044 | i / 2 << 8);
      weights[i] = __fmaf_rn(__uint_as_float(code), numbers.scale, numbers.shift);
    }
  }
};

template <>
struct FloatWeights<Q4_1> : FloatCodes {
  __device__ __forceinline__ static BlockNumbers numbers(const Run<Q4_1>& run) {
    const float2 own = unpack_halves(run.scale);
    return {own.x, __fmaf_rn(-kMagic, own.x, own.y)};
  }
};

template <>
struct FloatWeights<Q4_K> : FloatCodes {
  __device__ __forceinline__ static BlockNumbers numbers(const Run<Q4_K>& run) {
    const float2 above = unpack_halves(run.above);
    const float scale = above.x * static_cast<float>(run.scale & 0xff);
    return {scale, -__fmaf_rn(kMagic, scale, above.y * static_cast<float>(run.scale >> 8 & 0xff))};
  }
};

template <>
struct FloatWeights<Int4> : FloatCodes {
  __device__ __forceinline__ static BlockNumbers numbers(const Run<Int4>& run) {
    const float2 own = unpack_halves(run.scale);
    return {own.x, -(kMagic + own.y) * own.x};
  }
};

// The difference to 2^23 + 128 is exact. Times a scale, 2^23 + 128 would be rounded, and might overflow.
template <>
struct FloatWeights<Int8> {
  static constexpr float kMagic = 0x1p23f;

  __device__ __forceinline__ static BlockNumbers numbers(const Run<Int8>& run) {
    return {__uint_as_float(run.scale), 0.f};
  }
  __device__ __forceinline__ static void eight(float (&weights)[8], const uint32 (&words)[2],
                                               const BlockNumbers& numbers) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32 unsigned_codes = words[i / 4] ^ 0x80808080u;  // q + 128
      const uint32 code = prmt(unsigned_codes, __builtin_bit_cast(uint32, kMagic), 0x7440 | i % 4);
      weights[i] = __fmul_rn(__fadd_rn(__uint_as_float(code), -(kMagic + 128.f)), numbers.scale);
    }
  }
};

// The codebook is the one in float16.
template <>
struct FloatWeights<Nf4> {
  __device__ __forceinline__ static BlockNumbers numbers(const Run<Nf4>& run) {
    return {__uint_as_float(run.scale), 0.f};
  }
  __device__ __forceinline__ static void eight(float (&weights)[8], const uint32 (&words)[1],
                                               const BlockNumbers& numbers) {
    HalfWeights<Nf4>::each_pair(words[0], [&](int i, uint32 pair) {
      const float2 entries = unpack_halves(pair);
      weights[2 * i] = entries.x * numbers.scale;
      weights[2 * i + 1] = entries.y * numbers.scale;
    });
  }
};

// Weights 8 i to 8 i + 7 of a run, as Scalar.
template <typename Scalar, typename Format>
__device__ __forceinline__ uint4 eight_weights(const Run<Format>& run, int i) {
  constexpr int kWords = Format::kBits / 4;
  uint32 words[kWords];
#pragma unroll
  for (int word = 0; word < kWords; word++) words[word] = run.codes[i * kWords + word];
  if constexpr (kNarrowRange<Scalar>) {
    return HalfWeights<Format>::eight(words, HalfWeights<Format>::numbers(run));
  } else {
    float w[8];
    FloatWeights<Format>::eight(w, words, FloatWeights<Format>::numbers(run));
    return make_uint4(pack_pair<Scalar>(w[0], w[1]), pack_pair<Scalar>(w[2], w[3]), pack_pair<Scalar>(w[4], w[5]),
                      pack_pair<Scalar>(w[6], w[7]));
  }
}
