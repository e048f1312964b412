// The log-sum-exp and delta of one query row, from which the gradient of each of its scores follows:
//
//   p = exp(s - lse),   ds = p (keep dout . v - delta),   delta = rowsum(dout * out) - dlse
//
// (Dao et al., arXiv:2205.14135, appendix B.2; keep is dropout's factor). Both are given, so that every score is
// computed again without the other scores of its row.
#pragma once

#include "../../common/numeric.cuh"
#include "../../common/reduce.cuh"
#include "../backward_params.cuh"

// delta, which the scores of one query share, for the float32 backward (backward_delta.cu).

// One row, by a warp.
template <int kHeadDimV, typename Scalar>
__device__ __forceinline__ void store_delta(float* to_g, const BackwardParams& params, const Scalar* dout_g,
                                            const Scalar* out_g, const float* dlse_g, int batch, int head, int row) {
  const Scalar* dout_row_g = head_rows(dout_g, params.dout, batch, head, row);
  const Scalar* out_row_g = head_rows(out_g, params.attention.out, batch, head, row);
  float sum = 0.f;
  for (int d = lane_index(); d < kHeadDimV; d += kWarpSize) sum += to_float(dout_row_g[d]) * to_float(out_row_g[d]);
  sum = warp_reduce<Sum>(sum);
  if (lane_index() == 0) *to_g = dlse_g == nullptr ? sum : sum - *head_rows(dlse_g, params.dlse, batch, head, row);
}

// Values of a query's row that the gradient of a score needs.
struct RowSums {
  float lse_log2, delta;

  // A row without keys has lse = -inf, and so, in log2, one whose keys are all hidden by float32's lowest number:
  // infinity in its place gives every weight 0.
  __device__ __forceinline__ RowSums(float lse, float delta_)
      : lse_log2(lse * kLog2E == -kInfinity ? kInfinity : lse * kLog2E), delta(delta_) {}

  // At most 1: of an lse beyond 1e7 (a bias of such a size on all keys) the rounding alone is worth more than a key.
  __device__ __forceinline__ float weight(float s_log2) const { return ex2_approx(at_most(s_log2 - lse_log2, 0.f)); }
};
