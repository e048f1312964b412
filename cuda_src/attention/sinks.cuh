// Sinks: one learned score for each head, which joins the denominator of the softmax and has no value (as in
// StreamingLLM, Xiao et al., arXiv:2309.17453). An absent array's dtype is void.
#pragma once

#include "params.cuh"

// The head's sink in units of log2; -inf without one.
template <typename Sinks>
__device__ __forceinline__ float sink_log2(const void* sinks_g, const AttentionParams& params, int head) {
  return to_float(static_cast<const Sinks*>(sinks_g)[head * params.scores.sinks_stride]) * kLog2E;
}
template <>
__device__ __forceinline__ float sink_log2<void>(const void*, const AttentionParams&, int) {
  return -kInfinity;
}
