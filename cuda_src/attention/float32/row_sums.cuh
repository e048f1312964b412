// The log-sum-exp and delta of one query row, from which the gradient of each of its scores follows:
//
//   p = exp(s - lse),   ds = p (keep dout . v - delta),   delta = rowsum(dout * out) - dlse
//
// (Dao et al., arXiv:2205.14135, appendix B.2; keep is dropout's factor). Both are given, so that every score is
// computed again without the other scores of its row.
#pragma once

#include "../../common/numeric.cuh"

// What the gradient of a score needs of its query's row.
struct RowSums {
  float lse_log2, delta;

  // A row without keys has lse = -inf, and so, in log2, one whose keys are all hidden by float32's lowest number:
  // infinity in its place gives every weight 0.
  __device__ __forceinline__ RowSums(float lse, float delta_)
      : lse_log2(lse * kLog2E == -kInfinity ? kInfinity : lse * kLog2E), delta(delta_) {}

  // At most 1: of an lse beyond 1e7 (a bias of such a size on all keys) the rounding alone is worth more than a key.
  __device__ __forceinline__ float weight(float s_log2) const { return ex2_approx(at_most(s_log2 - lse_log2, 0.f)); }
};
