// Attention backward, between the rows' statistics and the tensor-core kernels of products: by how much dS is made smaller
// (gradient_scale.cuh), and delta with it.
//
// Shapes    BackwardParams (backward_params.cuh); sizes as backward_delta.cu leaves them, scales (B, H, 2).
// Work      one CTA of THREADS threads owns one key-value head of a sequence: grid B * G. It reads 8 bytes for every CTA_ROWS
//           rows of dout and of V, and the statistics of its rows only where k is not 0.
// Budget    one float per warp of shared memory; about 30 registers.
// Edges     without queries or keys the scale is 1.
#include "backward_scales.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_scales(const float* sizes_g, float* statistics_g, float* scales_g, const BackwardParams params) {
  const AttentionParams& attention = params.attention;
  const int kv_heads = attention.heads / attention.group;
  const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  write_scale(params, {sizes_g, statistics_g, scales_g}, batch, kv_head,
              scratch_row(params, batch, kv_head * attention.group, 0), attention.sq,
              scratch_rows(params) + static_cast<int64>(blockIdx.x) * padded_rows(attention.sk), attention.sk);
}
