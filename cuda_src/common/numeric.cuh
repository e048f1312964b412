// Storage dtypes, their conversion from and to float32, and the float32 functions that kernels share.
//
// Every kernel computes in float32 and rounds once, at the store. Exponentials have base 2 (one instruction on every
// NVIDIA GPU). Names of exponents in this base end in _log2: x_log2 = x * log2(e).
#pragma once

#ifdef BFLOAT16  // only if a kernel uses bfloat16 (runtime/spec.py): the header takes 5 of 21 ms before our first line
#include <cuda_bf16.h>
#endif
#include <cuda_fp16.h>

#include "config.cuh"

// NumPy's names, so that a configuration can define DTYPE as float16.
using float16 = __half;
using float32 = float;
#ifdef BFLOAT16
using bfloat16 = __nv_bfloat16;
#endif

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);  // NVRTC has no INFINITY
constexpr float kNaN = __builtin_bit_cast(float, 0x7fffffffu);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

enum class Unit { kNatural, kLog2 };  // of an exponent

__device__ __forceinline__ float to_float(float32 x) { return x; }
__device__ __forceinline__ float to_float(bool x) { return x ? 1.f : 0.f; }
__device__ __forceinline__ float to_float(float16 x) { return __half2float(x); }
#ifdef BFLOAT16
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }
#endif

// Whether a dtype has fewer exponents than float32, in which kernels compute.
template <typename Scalar>
constexpr bool kNarrowRange = false;
template <>
constexpr bool kNarrowRange<float16> = true;

// The minimum, but NaN for x = NaN, where fminf returns the limit.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }

// The minimum, but NaN if one is, in one instruction from sm_80 on.
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}

// Round to nearest even. This is the only rounding of a result before its store.
template <typename Scalar>
__device__ __forceinline__ Scalar from_float(float x);
template <>
__device__ __forceinline__ float32 from_float<float32>(float x) {
  return x;
}
template <>
__device__ __forceinline__ float16 from_float<float16>(float x) {
  return __float2half_rn(x);
}
#ifdef BFLOAT16
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
#endif

// ex2.approx: at most 2 ulp (2^-22 relative), 0 for -inf; subnormal results are flushed.
__device__ __forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx: at most 1 ulp.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx: absolute error 2^-22 on (0.5, 2), relative 2^-22 elsewhere.
__device__ __forceinline__ float lg2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
