// Formats of weights in four or eight bits: storage and numbers. A weight (N, K) has a row of codes for each n, and
// blocks of neighbouring k that share a scale.
//
//   Nf4    w = codebook[q] * absmax     two codes a byte, that of an even k in the high nibble, as in bitsandbytes;
//                                       scales float32 (N, K / b)
//   Int4   w = (q - zero) * scale       two a byte, that of an even k in the low nibble; float16 (N, K / b, 2)
//   Int8   w = q * scale                signed bytes; float32 (N, K / b)
//   Q4_1   w = q * scale + offset       as Int4; float16 (N, K / 32, 2)                            (ggml's Q4_1)
//   Q4_K   w = q * (d sc) - (dmin m)    as Int4; bytes (N, K / 32, 2) of (sc, m), and float16 (N, K / 256, 2) of
//                                       (d, dmin)                                                  (ggml's Q4_K)
//
// This is float32 arithmetic with one rounding: with a float16 scale, q * scale and q * (d sc) are exact, and so are d
// sc and dmin m. A fused multiply-add gives the same bits. (An Int4 whose zero is an integer, as in files, is exact.)
#pragma once

#include "../../common/memory.cuh"
#include "../../common/numeric.cuh"

// The normal distribution's quantiles (Dettmers et al., arXiv:2305.14314, appendix E), as bitsandbytes rounds them.
constexpr int kCodes = 16;
constexpr float kNf4Codebook[kCodes] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

enum class Shift { kNone, kBefore, kAfter };  // what a block adds to the code, or to the product

// The defaults of a format.
struct Integers {
  static constexpr int kBits = 4;
  static constexpr bool kEvenHigh = false;  // the nibble of an even k
  using Code = unsigned char;
  using Scale = float16;
  static constexpr bool kCodebook = false;
  static constexpr int kNumbers = 2;     // of scales to a block
  static constexpr int kSuperBlock = 0;  // weights that share a (d, dmin)
  static constexpr Shift kShift = Shift::kNone;
};
struct Nf4 : Integers {
  static constexpr bool kEvenHigh = true;
  using Scale = float;
  static constexpr bool kCodebook = true;
  static constexpr int kNumbers = 1;
};
struct Int4 : Integers {
  static constexpr Shift kShift = Shift::kBefore;
};
struct Int8 : Integers {
  static constexpr int kBits = 8;
  using Code = signed char;
  using Scale = float;
  static constexpr int kNumbers = 1;
};
struct Q4_1 : Integers {
  static constexpr Shift kShift = Shift::kAfter;
};
struct Q4_K : Integers {
  using Scale = unsigned char;
  static constexpr int kSuperBlock = 256;
  static constexpr Shift kShift = Shift::kAfter;
};

// Word i of 16 bytes of codes.
__device__ __forceinline__ uint32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The numbers that the weights of a block share. `shift` is an Int4's zero, or is added after the product.
struct BlockNumbers {
  float scale, shift;
};

// The numbers of the `block`-th of all rows' blocks, within the `super_block`-th of all rows' super-blocks.
template <typename Format>
__device__ __forceinline__ BlockNumbers block_numbers(const typename Format::Scale* scales_g,
                                                      const float16* super_scales_g, int64 block, int64 super_block) {
  const typename Format::Scale* own_g = scales_g + block * Format::kNumbers;
  if constexpr (Format::kSuperBlock > 0) {
    const float16* above_g = super_scales_g + super_block * Format::kNumbers;
    return {to_float(above_g[0]) * static_cast<float>(own_g[0]),
            -(to_float(above_g[1]) * static_cast<float>(own_g[1]))};
  } else if constexpr (Format::kNumbers == 2) {
    return {to_float(own_g[0]), to_float(own_g[1])};
  } else {
    return {to_float(own_g[0]), 0.f};
  }
}

// The weight of a code q, which is the codebook's entry for Nf4, otherwise the integer.
template <typename Format>
__device__ __forceinline__ float weight_of(float q, const BlockNumbers& block) {
  if constexpr (Format::kShift == Shift::kBefore) {
    return (q - block.shift) * block.scale;
  } else if constexpr (Format::kShift == Shift::kAfter) {
    return __fmaf_rn(q, block.scale, block.shift);
  } else {
    return q * block.scale;
  }
}
