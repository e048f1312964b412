// Sums and maxima over a warp (by shuffles) and over a CTA (by shuffles, then one float per warp in shared memory).
//
// All threads of the warp or CTA must take part, and all get the result. The order of the additions is fixed, so a
// result is the same in every run.
#pragma once

#include "barrier.cuh"
#include "numeric.cuh"

struct Sum {
  static constexpr float kIdentity = 0.f;
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {
  static constexpr float kIdentity = -kInfinity;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// A butterfly reduction over kWidth neighbouring lanes, a power of two.
template <typename Op, int kWidth = kWarpSize, typename T = float>
__device__ __forceinline__ T warp_reduce(T x, Op op = Op()) {
  static_assert(kWidth >= 1 && kWidth <= kWarpSize && (kWidth & (kWidth - 1)) == 0, "a power of two lanes");
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(kFullWarp, x, distance));
  }
  return x;
}

// `partial_s` has one item per warp. The caller may reuse it only after its next barrier. Two reductions in a row may
// use the same one, because each begins with a barrier.
template <typename Op, int kThreads, typename T>
__device__ __forceinline__ T cta_reduce(T x, T* partial_s, Op op = Op()) {
  constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kThreads % kWarpSize == 0 && kWarps <= kWarpSize, "whole warps, at most 32 of them");
  x = warp_reduce(x, op);
  if (kWarps == 1) return x;

  __syncthreads();  // partial_s: the previous reduction's readers are done
  if (lane_index() == 0) partial_s[warp_index()] = x;
  __syncthreads();  // partial_s: written by every warp
  return warp_reduce(lane_index() < kWarps ? partial_s[lane_index()] : Op::kIdentity, op);
}
