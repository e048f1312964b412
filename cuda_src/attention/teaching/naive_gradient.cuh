// What the naive backward kernels have in common: their macros, and the delta that one leaves for the others.
#pragma once

#if !defined(BIAS) || !defined(MASK) || !defined(SLOPES) || !defined(SOFTCAP) || !defined(DROPOUT) || !defined(MODIFIED)
#error "BIAS, MASK, SLOPES, SOFTCAP, DROPOUT and MODIFIED come from a launch-configuration table"
#endif
#include "../backward_params.cuh"
#include "../modifiers.cuh"
#include "../score_gradient.cuh"

struct NaiveTraits {
  using Scalar = DTYPE;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options>;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kThreads = THREADS;
  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps");
};

// The delta of one head's rows.
template <typename Float>
__device__ __forceinline__ Float* delta_rows(Float* delta_g, const AttentionParams& params, int batch, int head) {
  return delta_g + (static_cast<int64>(batch) * params.heads + head) * params.sq;
}
