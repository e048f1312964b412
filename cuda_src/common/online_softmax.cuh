// The running softmax of one row: Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (arXiv:1805.02867), algorithm 3.
//
// After scores s_1..s_n: m = max s_i and l = sum exp(s_i - m). A row without keys has m = -inf and l = 0; its output is
// 0 and its log-sum-exp -inf. Scores that are products have log2(e) in their factor, so they are in units of log2. This
// saves a multiplication for each. Scores that are read from memory are not scaled, so that s - m is computed before
// any rounding.
#pragma once

#include "numeric.cuh"

template <Unit kUnit>
struct OnlineSoftmax {
  float m = -kInfinity;  // in the unit of the scores
  float l = 0.f;

  // exp(score - m), the weight of a score for the current maximum. Without a maximum, 0 is used instead, so that
  // -inf - (-inf) is never computed.
  __device__ __forceinline__ float weight(float score) const {
    const float difference = score - (m == -kInfinity ? 0.f : m);
    return ex2_approx(kUnit == Unit::kLog2 ? difference : difference * kLog2E);
  }

  // Raise the maximum to at least tile_max. Returns the factor for everything that was accumulated with the old
  // maximum: l has been scaled by it already, and the caller scales its own accumulators.
  __device__ __forceinline__ float raise(float tile_max) {
    const float old_m = m;
    m = fmaxf(m, tile_max);
    const float shrink = weight(old_m);
    l *= shrink;
    return shrink;
  }

  // 1 / l, and 0 for a row without keys.
  __device__ __forceinline__ float normaliser() const { return l == 0.f ? 0.f : 1.f / l; }

  // Natural log of sum exp(score).
  __device__ __forceinline__ float lse() const {
    if (l == 0.f) return -kInfinity;
    return kUnit == Unit::kLog2 ? (m + lg2_approx(l)) * kLn2 : m + lg2_approx(l) * kLn2;
  }
};
