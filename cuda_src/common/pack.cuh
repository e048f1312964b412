// Pairs of float16 (or bfloat16) in one word, as in tensor-core fragments: the first number is in the low half.
#pragma once

#include "numeric.cuh"

// The halves of the result are the high halves of x and y.
__device__ __forceinline__ uint32 prmt_high_halves(uint32 x, uint32 y) {
  uint32 packed;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(packed) : "r"(x), "r"(y));
  return packed;
}

// Digit i of the selector is the number of the byte for byte i of the result: 0 to 3 of x, 4 to 7 of y. With 8 added,
// byte i is eight copies of the sign bit of that byte.
__device__ __forceinline__ uint32 prmt(uint32 x, uint32 y, uint32 selector) {
  uint32 permuted;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(permuted) : "r"(x), "r"(y), "r"(selector));
  return permuted;
}

// Arithmetic on both numbers of a word. With .rn the compiler does not fuse two of these into one instruction.
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

// From sm_80 on.
__device__ __forceinline__ uint32 fma_bf16x2(uint32 x, uint32 y, uint32 z) {
  uint32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}

// Pack x and y, rounded to nearest even.
__device__ __forceinline__ uint32 pack_halves(float x, float y) {
  return __half_as_ushort(__float2half_rn(x)) | static_cast<uint32>(__half_as_ushort(__float2half_rn(y))) << 16;
}

// The two numbers of a word.
__device__ __forceinline__ float2 unpack_halves(uint32 word) {
  return __half22float2(
      __halves2half2(__ushort_as_half(static_cast<uint16>(word)), __ushort_as_half(static_cast<uint16>(word >> 16))));
}

// A word of two numbers of any dtype of 16 bits.
template <typename Scalar>
__device__ __forceinline__ uint32 pair_of(Scalar low, Scalar high) {
  return *reinterpret_cast<const uint16*>(&low) | static_cast<uint32>(*reinterpret_cast<const uint16*>(&high)) << 16;
}

// Both for any such dtype.
template <typename Scalar>
__device__ __forceinline__ uint32 pack_pair(float x, float y) {
  return pair_of(from_float<Scalar>(x), from_float<Scalar>(y));
}
template <>
__device__ __forceinline__ uint32 pack_pair<float16>(float x, float y) {
  return pack_halves(x, y);
}

#if defined(BFLOAT16) && __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ uint32 pack_pair<bfloat16>(float x, float y) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(y), "f"(x));
  return packed;
}
#endif

// Pack x and y, rounded to nearest even and clamped (sm_80 or later): float16 to its largest number, which the
// conversion does for nothing, bfloat16 to at most 2^16. A NaN stays one.
template <typename Scalar>
__device__ __forceinline__ uint32 pack_clamped(float x, float y);
template <>
__device__ __forceinline__ uint32 pack_clamped<float16>(float x, float y) {
  uint32 packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(y), "f"(x));
  return packed;
}
#ifdef BFLOAT16
template <>
__device__ __forceinline__ uint32 pack_clamped<bfloat16>(float x, float y) {
  constexpr uint32 kBoth = 0x47804780u;  // 2^16, twice
  uint32 packed;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(packed) : "r"(pack_pair<bfloat16>(x, y)), "r"(kBoth));
  return packed;
}
#endif

template <typename Scalar>
__device__ __forceinline__ float2 unpack_pair(uint32 word) {
  const uint16 low = static_cast<uint16>(word), high = static_cast<uint16>(word >> 16);
  return {to_float(*reinterpret_cast<const Scalar*>(&low)), to_float(*reinterpret_cast<const Scalar*>(&high))};
}
template <>
__device__ __forceinline__ float2 unpack_pair<float16>(uint32 word) {
  return unpack_halves(word);
}

// Pack x * 2^112 and y * 2^112 for 0 <= x, y <= 65504 * 2^-112. With this scale the exponent field of float32 is that
// of float16, so packing is two shifts and a byte permute. Conversions would use Turing's slowest pipe. Rounds to
// nearest, ties away from 0. Scaled numbers below 2^-14 are 0, because float32 has flushed them. With kKeepsNan a NaN
// stays a NaN, for one more instruction each; otherwise a GPU's own NaN (0x7fffffff) becomes 0.
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
