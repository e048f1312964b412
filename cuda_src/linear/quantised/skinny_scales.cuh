// The numbers that blocks of weights share, in the skinny kernels: a block's products with the codes are summed, and
// then
//
//   sum_k w x = scale sum_k q x + shift sum_k x
//
// so that codes stay exact, and scales float32. An Int4's shift is -scale zero, which float32 holds exactly.
//
// A span is the 64 bytes of codes that four lanes read of a column: 128 k, or 64 in eight bits. Its blocks' numbers are
// contiguous, a word a block, except in Q4_K (two bytes, and a word for eight blocks). Those of blocks that do not
// exist are zeros, and are not read.
#pragma once

#include "../../common/streaming.cuh"
#include "formats.cuh"

// kCount neighbouring words; kVec: all exist or none, and they are aligned to their size.
template <int kCount, bool kVec>
__device__ __forceinline__ void load_words(uint32 (&words)[kCount], const uint32* source, int count) {
  if constexpr (!kVec || kCount == 1) {
#pragma unroll
    for (int i = 0; i < kCount; i++) words[i] = ld_u32_if(source + i, i < count);
  } else if constexpr (kCount == 2) {
    const uint2 v = ld_v2_if(source, count > 0);
    words[0] = v.x, words[1] = v.y;
  } else {
    const uint4 v = ld_v4_if(source, count > 0);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
}

__device__ __forceinline__ float2 float_pair(uint32 word) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}

// A byte as a float, without a conversion: 2^23 + byte, minus 2^23.
__device__ __forceinline__ float float_of_byte(uint32 word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 + i)) - 0x1p23f;
}

template <typename Format, int kBlocks, bool kVec>
struct SpanScales {
  static constexpr bool kShifted = Format::kShift != Shift::kNone;
  uint32 words[kBlocks];

  // From block `block` of all rows' blocks on, of which `count` exist.
  __device__ __forceinline__ void load(const uint32* scales_g, const uint32*, uint32 block, int count) {
    load_words<kBlocks, kVec>(words, scales_g + block, count);
  }

  __device__ __forceinline__ BlockNumbers of(int block) const {
    if constexpr (!kShifted) return {__uint_as_float(words[block]), 0.f};
    const float2 own = float_pair(words[block]);
    return {own.x, Format::kShift == Shift::kBefore ? -own.x * own.y : own.y};
  }
};

template <int kBlocks, bool kVec>
struct SpanScales<Q4_K, kBlocks, kVec> {
  static_assert(kBlocks == 4, "blocks of 32 of the 128 k of a span");
  static constexpr bool kShifted = true;
  uint32 words[2], above;

  __device__ __forceinline__ void load(const uint32* scales_g, const uint32* super_scales_g, uint32 block, int count) {
    load_words<2, kVec>(words, scales_g + block / 2, count);
    above = ld_u32_if(super_scales_g + block / 8, count > 0);
  }

  __device__ __forceinline__ BlockNumbers of(int block) const {
    const float2 super = float_pair(above);
    const int byte = block % 2 * 2;
    return {super.x * float_of_byte(words[block / 2], byte), -super.y * float_of_byte(words[block / 2], byte + 1)};
  }
};
