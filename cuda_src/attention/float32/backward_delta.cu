// The first step of the float32 backward: what one query's scores share.
//
//   delta_i = sum_d dout_id out_id - dlse_i
//
// (Dao et al., arXiv:2205.14135, appendix B.2, equation 4; the gradient of lse_i, if there is one, joins each score's
// as p_ij dlse_i.)
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
// Work      a warp owns a row; grid ceil(B * H * Sq / (THREADS / 32)).
// Edges     a row without keys has any delta: its weights are 0. dlse may be null.
#if !defined(DTYPE) || !defined(HEAD_DIM_V) || !defined(THREADS)
#error "DTYPE, HEAD_DIM_V and THREADS come from a launch-configuration table"
#endif
#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_f32_delta(const DTYPE* dout_g, const DTYPE* out_g, const float* dlse_g, float* delta_g,
                                 const BackwardParams params) {
  const AttentionParams& forward = params.attention;
  const int64 flat = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int row = static_cast<int>(flat % forward.sq);
  const int head = static_cast<int>(flat / forward.sq % forward.heads);
  const int batch = static_cast<int>(flat / forward.sq / forward.heads);
  if (batch >= params.batch) return;  // the whole warp
  store_delta<HEAD_DIM_V>(delta_g + flat, params, dout_g, out_g, dlse_g, batch, head, row);
}
