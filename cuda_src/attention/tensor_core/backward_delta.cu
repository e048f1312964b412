// Attention backward, before the tensor-core kernels: each row's statistics, and zeros where others add.
//
//   delta_i = sum_d dout_id out_id - dlse_i          (Dao et al., arXiv:2205.14135, appendix B.2; dlse: whoever
//                                                     differentiates through lse as well)
//
// Shapes    BackwardParams (backward_params.cuh), which also says what the statistics are.
// Work      ROW_LANES lanes own one row, each 8 columns of it; grid B * H * rows_padded / (THREADS / ROW_LANES), at
//           least 1. The scratch to be zeroed is spread over the grid.
// Budget    no shared memory; about 40 registers. Reads out and dout once.
// Edges     rows without a key, and padding rows, get L = +inf and delta = 0.
#include "backward_delta.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_delta(const float16* out_g, const float16* dout_g, const float* lse_g, const float* dlse_g,
                             float* statistics_g, float* zeroed_g, const BackwardParams params) {
  const AttentionParams& attention = params.attention;
  clear_scratch(zeroed_g, params.zeroed);

  const int64 flat = static_cast<int64>(blockIdx.x) * Traits::kRows + threadIdx.x / Traits::kRowLanes;
  const int row = flat % params.rows_padded;
  const int64 sequence = flat / params.rows_padded;
  const int head = sequence % attention.heads, batch = sequence / attention.heads;
  write_statistics(params, {out_g, dout_g, lse_g, dlse_g, statistics_g}, batch, head, row, row < attention.sq,
                   scratch_row(params, batch, head, row));
}
