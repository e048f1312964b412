// Eight neighbouring weights of a row from their codes, in float16 for tensor cores, or in bfloat16 from there.
//
// Their error is bounded in cupyattn/ops/linear/bounds.py (weight_error): integers are exact, by placing a code in the
// mantissa of 1024; a product and a sum that follow round once each.
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

  __device__ __forceinline__ static uint4 eight(const uint32 (&words)[1], const HalfNumbers& numbers) {
    const uint32 word = words[0], selectors = word & 0x77777777u;
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32 selector = selectors >> 16 * i;
      const uint32 upper = prmt(word, word << 4, i ? 0xbfae : 0x9d8c);
      const uint32 low = looked_up<0>(selector, upper), high = looked_up<8>(selector, upper);
      // An even k is in the high nibble of a byte.
      pairs[2 * i] = mul_f16x2(prmt(low, high, 0x4051), numbers.scale);
      pairs[2 * i + 1] = mul_f16x2(prmt(low, high, 0x6273), numbers.scale);
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};

// Eight numbers of float16 as Scalar.
template <typename Scalar>
__device__ __forceinline__ uint4 rounded(const uint4& halves) {
  const uint32 words[4] = {halves.x, halves.y, halves.z, halves.w};
  uint32 own[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = unpack_halves(words[i]);
    own[i] = pack_pair<Scalar>(pair.x, pair.y);
  }
  return make_uint4(own[0], own[1], own[2], own[3]);
}
template <>
__device__ __forceinline__ uint4 rounded<float16>(const uint4& halves) {
  return halves;
}

// Weights 8 i to 8 i + 7 of a run.
template <typename Format>
__device__ __forceinline__ uint4 eight_weights(const Run<Format>& run, int i) {
  constexpr int kWords = Format::kBits / 4;
  uint32 words[kWords];
#pragma unroll
  for (int word = 0; word < kWords; word++) words[word] = run.codes[i * kWords + word];
  return HalfWeights<Format>::eight(words, HalfWeights<Format>::numbers(run));
}
