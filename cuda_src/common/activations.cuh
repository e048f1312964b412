// Activations and their derivatives in float32: Gelu (exact), GeluTanh, Silu, Relu, each with value(x) and
// derivative(x).
//
// Each is x times a probability: x / (1 + e^-z) with z = x (silu) or z = 2 sqrt(2/pi) (x + 0.044715 x^3) (the tanh form
// of gelu, since (1 + tanh u) / 2 = 1 / (1 + e^-2u)), and x Phi(x) with the normal distribution function Phi (gelu:
// Hendrycks and Gimpel, arXiv:1606.08415). The smaller of p and 1 - p is computed from e^-|z| or e^(-x^2/2), and the
// larger is 1 minus the smaller. So the left tail keeps its relative accuracy, where 1 + tanh and 1 + erf cancel.
//
// Errors    in units of 2^-24. Values, relative to |value|: silu 9 + 2 |x|, gelu_tanh 9 + 7 |z|, gelu 33 + 1.5 x^2 (the
//           growing terms are the rounding of exponents). Derivatives, relative to p + |x p'|: 14 + 2 |x|, 20 + 7 |z|,
//           33 + 1.5 x^2. Results below 2^-118 may become 0: the exponential is flushed there.
//           cupyattn/ops/activations/bounds.py derives all of it.
// Edges     value(-inf) = -0 and value(inf) = inf, derivative(-inf) = 0 and derivative(inf) = 1, their limits; NaN
//           gives NaN. No intermediate is inf * 0.
// Cost      one ex2 and one rcp each, and about 8 other instructions for silu, 11 for gelu_tanh and 18 for gelu.
//           If a kernel needs value and derivative of one x, the compiler computes their common terms once.
#pragma once

#include "numeric.cuh"

constexpr float kLargestFinite = 3.4028234e38f;

// x p, for a p that is 0 at x = -inf. For x = NaN the result is NaN because p is.
__device__ __forceinline__ float times_probability(float x, float p) { return fmaxf(x, -kLargestFinite) * p; }

// x p', for a p' that is 0 for |x| >= limit; x may be infinite.
__device__ __forceinline__ float times_slope(float x, float slope, float limit) {
  return fminf(fmaxf(x, -limit), limit) * slope;
}

// p = 1 / (1 + e^-z) and p (1 - p), from t = e^-|z| <= 1.
struct Logistic {
  float probability, slope;

  __device__ __forceinline__ explicit Logistic(float z) {
    const float t = ex2_approx(-kLog2E * fabsf(z));
    const float larger = rcp_approx(1.f + t);
    const float smaller = t * larger;
    probability = z > 0.f ? larger : smaller;
    slope = smaller * larger;
  }
};

struct Silu {
  static __device__ __forceinline__ float value(float x) { return times_probability(x, Logistic(x).probability); }

  static __device__ __forceinline__ float derivative(float x) {
    const Logistic p(x);
    return p.probability + times_slope(x, p.slope, 128.f);  // e^-128 < 2^-126
  }
};

struct GeluTanh {
  static constexpr float kLinear = 1.5957691216057308f;  // 2 sqrt(2/pi)
  static constexpr float kCubic = 0.07135481282052424f;  // 0.044715 of it
  static constexpr float kLimit = 64.f;                  // z = 18,800

  static __device__ __forceinline__ float logit(float x) { return x * (kLinear + kCubic * x * x); }

  static __device__ __forceinline__ float value(float x) {
    return times_probability(x, Logistic(logit(x)).probability);
  }

  static __device__ __forceinline__ float derivative(float x) {
    const Logistic p(logit(x));
    const float near = fminf(fabsf(x), kLimit);
    return p.probability + times_slope(x, (kLinear + 3.f * kCubic * near * near) * p.slope, kLimit);
  }
};

// Phi(x) and its density. Phi(-a) = e^(-a^2/2) R(a) for a >= 0, and R(a) = s P(s) with s = 1 / (1 + c a): the
// polynomial P, of degree 7, is the minimax fit in relative error over 0 <= a <= 14.5 (2^-23.1 with rounded
// coefficients), beyond which the exponential vanishes.
struct Normal {
  float probability, density;

  __device__ __forceinline__ explicit Normal(float x) {
    constexpr float kC = 0.3046875f;
    constexpr float kP[] = {0.121514834f,   0.122347765f, 0.10327936f,   0.121234447f,
                            -0.0384617709f, 0.186484367f, -0.152963296f, 0.036564298f};
    const float exponential = ex2_approx(-0.5f * kLog2E * (x * x));
    const float s = rcp_approx(1.f + kC * fabsf(x));
    float polynomial = kP[7];
#pragma unroll
    for (int i = 6; i >= 0; i--) polynomial = polynomial * s + kP[i];
    const float smaller = polynomial * s * exponential;
    probability = x > 0.f ? 1.f - smaller : smaller;
    density = 0.3989422804014327f * exponential;  // 1 / sqrt(2 pi)
  }
};

struct Gelu {
  static __device__ __forceinline__ float value(float x) { return times_probability(x, Normal(x).probability); }

  static __device__ __forceinline__ float derivative(float x) {
    const Normal p(x);
    return p.probability + times_slope(x, p.density, 16.f);  // e^-128 < 2^-126
  }
};

struct Relu {
  static __device__ __forceinline__ float value(float x) { return x < 0.f ? 0.f : x; }
  static __device__ __forceinline__ float derivative(float x) { return x > 0.f ? 1.f : x <= 0.f ? 0.f : x; }
};

// No activation.
struct Identity {
  static __device__ __forceinline__ float value(float x) { return x; }
  static __device__ __forceinline__ float derivative(float) { return 1.f; }
};

template <typename Activation>
constexpr bool kIsIdentity = false;
template <>
constexpr bool kIsIdentity<Identity> = true;
