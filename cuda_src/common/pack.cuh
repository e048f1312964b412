// Two float32 in one word of float16, as tensor-core fragments are kept: the first in the low half.
#pragma once

#include "numeric.cuh"

// The halves of the result are the high halves of x and y.
__device__ __forceinline__ uint32 prmt_high_halves(uint32 x, uint32 y) {
  uint32 packed;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(packed) : "r"(x), "r"(y));
  return packed;
}

// Byte i of the result is that of x and y (the upper four) that digit i of the selector numbers, or with 8 added
// eight times its sign.
__device__ __forceinline__ uint32 prmt(uint32 x, uint32 y, uint32 selector) {
  uint32 permuted;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(permuted) : "r"(x), "r"(y), "r"(selector));
  return permuted;
}

// Of both numbers of a word. .rn: the compiler makes no other instruction of two of these.
__device__ __forceinline__ uint32 add_f16x2(uint32 x, uint32 y) {
  uint32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
  return sum;
}

__device__ __forceinline__ uint32 mul_f16x2(uint32 x, uint32 y) {
  uint32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

__device__ __forceinline__ uint32 fma_f16x2(uint32 x, uint32 y, uint32 z) {
  uint32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}

// x and y, to the nearest even.
__device__ __forceinline__ uint32 pack_halves(float x, float y) {
  return __half_as_ushort(__float2half_rn(x)) | static_cast<uint32>(__half_as_ushort(__float2half_rn(y))) << 16;
}

// The two numbers of a word.
__device__ __forceinline__ float2 unpack_halves(uint32 word) {
  return __half22float2(
      __halves2half2(__ushort_as_half(static_cast<uint16>(word)), __ushort_as_half(static_cast<uint16>(word >> 16))));
}

// x * 2^112 and y * 2^112 for 0 <= x, y <= 65504 * 2^-112: so scaled, the exponent field of float32 is that of float16,
// and packing is two shifts and a byte permute, where conversions would go to Turing's slowest pipe. To the nearest,
// ties away; below 2^-14 of the scaled numbers float32 has flushed to 0. With kKeepsNan a NaN stays
// one, for an instruction more each; a GPU's own NaN (0x7fffffff) becomes 0 otherwise.
template <bool kKeepsNan = false>
__device__ __forceinline__ uint32 pack_shifted(float x, float y) {
  constexpr uint32 kNanBits = 0x0fff0000u;  // of a NaN in float16, before the shift
  const uint32 x_bits = kKeepsNan ? min(__float_as_uint(x), kNanBits) : __float_as_uint(x);
  const uint32 y_bits = kKeepsNan ? min(__float_as_uint(y), kNanBits) : __float_as_uint(y);
  return prmt_high_halves(x_bits * 8u + 0x8000u, y_bits * 8u + 0x8000u);
}

// An AND mask for packed numbers.
__device__ __forceinline__ uint32 halves_mask(bool low, bool high) {
  return (low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u);
}
