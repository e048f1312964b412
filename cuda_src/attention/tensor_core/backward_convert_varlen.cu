// Attention backward of packed sequences, after the one-pass kernel: as backward_convert.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh).
// Work      as backward_convert.cu; grid H * rows_padded / 64. Each warp looks for its sequence, 32 at a time.
// Budget    as backward_convert.cu.
// Edges     rows beyond their sequence are not stored.
#include "backward_convert.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_convert_varlen(const float* dq_acc_g, const float* scales_g, float16* dq_g,
                                      const void* cu_seqlens_q_g, const VarlenBackwardParams params) {
  const BackwardParams& backward = params.backward;
  const PackedRows queries = packed_queries(params.packed, backward.attention, {cu_seqlens_q_g});
  const int tiles = backward.rows_padded / kRowPad;
  const int head = blockIdx.x / tiles, scratch = blockIdx.x % tiles * kRowPad;
  const int batch = sequence_of_scratch(queries, scratch);
  const RowSpan rows = queries.of(batch);
  const int row = scratch - scratch_begin(rows, batch);
  if (row < 0) return;  // lengths that fall
  convert_rows(backward, dq_acc_g, scales_g, rows_from(dq_g, backward.dq, rows), batch, head, row, rows.count,
               scratch_row(backward, 0, head, scratch));
}
