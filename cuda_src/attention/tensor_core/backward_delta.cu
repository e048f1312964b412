// Attention backward, before the tensor-core kernels: each row's statistics, and zeros where others add.
//
//   delta_i = sum_d dout_id out_id - dlse_i          (Dao et al., arXiv:2205.14135, appendix B.2; dlse: whoever
//                                                     differentiates through lse as well)
//
// And of its rows each CTA says how large they are (gradient_scale.cuh): of dout, or, behind those, of V.
//
// Shapes    BackwardParams (backward_params.cuh), which also says what the statistics are; sizes (CTAs, 2).
// Work      ROW_LANES lanes own one row, each 8 columns of it; grid B * H * rows_padded / (THREADS / ROW_LANES), at
//           least 1, and behind that B * G * keys_padded / (THREADS / ROW_LANES). The scratch to be zeroed is spread
//           over the grid.
// Budget    a float per warp of shared memory; about 40 registers. Reads out, dout and V once.
// Edges     rows without a key, and padding rows, get L = +inf and delta = 0.
#include "backward_delta.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_delta(const float16* out_g, const float16* dout_g, const float* lse_g, const float* dlse_g,
                             const float16* v_g, float* statistics_g, float* sizes_g, float* zeroed_g,
                             const void* seqused_k_g, const BackwardParams params) {
  const AttentionParams& attention = params.attention;
  clear_scratch(zeroed_g, params.zeroed);

  const int64 flat = static_cast<int64>(blockIdx.x) * Traits::kRows + threadIdx.x / Traits::kRowLanes;
  const int64 rows = scratch_rows(params);
  Sizes sizes;
  if (flat < rows) {
    const int row = flat % params.rows_padded;
    const int64 sequence = flat / params.rows_padded;
    const int head = sequence % attention.heads, batch = sequence / attention.heads;
    sizes = write_statistics(params, {out_g, dout_g, lse_g, dlse_g, statistics_g}, batch, head, row, row < attention.sq,
                             scratch_row(params, batch, head, row));
  } else {
    const int padded = padded_rows(attention.sk), kv_heads = attention.heads / attention.group;
    const int key = (flat - rows) % padded;
    const int64 sequence = (flat - rows) / padded;
    const int kv_head = sequence % kv_heads, batch = sequence / kv_heads;
    sizes =
        value_sizes(head_rows(v_g, attention.v, batch, kv_head, key), key < keys_in_use(attention, seqused_k_g, batch));
  }
  write_sizes(sizes_g, sizes);
}
