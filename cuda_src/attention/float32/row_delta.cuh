// What the scores of one query share, for the float32 backward: backward_delta.cu says what it is.
#pragma once

#include "../../common/reduce.cuh"
#include "../backward_params.cuh"

// Of one row, by a warp.
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
