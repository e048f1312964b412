// The last step of the one-pass backward of float16 and bfloat16: dQ, which attention_backward_f32_dkdv added up in
// float32 scratch memory, to dq's dtype and strides.
//
// Shapes    dq_acc (B, H, Sq, D) float32, contiguous; BackwardParams (backward_params.cuh).
// Work      a warp owns a row; grid ceil(B * H * Sq / (THREADS / 32)).
// Edges     warps beyond the last row do nothing.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(THREADS)
#error "DTYPE, HEAD_DIM and THREADS come from a launch-configuration table"
#endif
#include "../backward_params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_f32_convert(const float* dq_acc_g, DTYPE* dq_g, const BackwardParams params) {
  const AttentionParams& forward = params.attention;
  const int64 flat = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int row = static_cast<int>(flat % forward.sq);
  const int head = static_cast<int>(flat / forward.sq % forward.heads);
  const int batch = static_cast<int>(flat / forward.sq / forward.heads);
  if (batch >= params.batch) return;  // the whole warp

  const float* row_acc_g = dq_acc_g + flat * HEAD_DIM;
  DTYPE* row_g = head_rows(dq_g, params.dq, batch, head, row);
  for (int d = lane_index(); d < HEAD_DIM; d += kWarpSize) store_gradient(row_g + d, row_acc_g[d], params);
}
