// Attention backward of packed sequences, before the tensor-core kernels: as backward_delta.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh).
// Work      as backward_delta.cu; grid H * rows_padded / (THREADS / ROW_LANES). Each warp looks for its
//           sequence, 32 at a time.
// Budget    as backward_delta.cu.
// Edges     as backward_delta.cu; rows of the scratch that belong to no sequence get L = +inf and delta = 0 too.
#include "backward_delta.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_delta_varlen(const float16* out_g, const float16* dout_g, const float* lse_g,
                                    const float* dlse_g, float* statistics_g, float* zeroed_g,
                                    const void* cu_seqlens_q_g, const VarlenBackwardParams params) {
  const BackwardParams& backward = params.backward;
  clear_scratch(zeroed_g, backward.zeroed);

  const PackedRows queries = packed_queries(params.packed, backward.attention, {cu_seqlens_q_g});
  const int64 flat = static_cast<int64>(blockIdx.x) * Traits::kRows + threadIdx.x / Traits::kRowLanes;
  const int scratch = flat % backward.rows_padded, head = flat / backward.rows_padded;
  const int batch = sequence_of_scratch(queries, scratch);
  const RowSpan rows = queries.of(batch);
  const int row = scratch - scratch_begin(rows, batch);
  write_statistics(backward, {out_g, dout_g, lse_g, dlse_g, statistics_g}, batch, head, rows.begin + row,
                   0 <= row && row < rows.count, scratch_row(backward, 0, head, scratch));
}
