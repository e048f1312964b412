// Attention backward, after the one-pass kernel: the float32 dQ, which that kernel gathered in accumulator-fragment
// order (backward_params.cuh), to float16 in dq's own strides.
//
// Shapes    BackwardParams (backward_params.cuh).
// Work      a CTA owns 64 rows of one head; a thread, 8 columns of a row at a time. Eight neighbouring threads take the
//           rows of one half of a fragment: 128 contiguous bytes. Grid B * H * rows_padded / 64.
// Budget    no shared memory; about 40 registers.
// Edges     rows beyond Sq are not stored.
#include "backward_convert.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_convert(const float* dq_acc_g, const float* scales_g, float16* dq_g,
                               const BackwardParams params) {
  const int tiles = params.rows_padded / kRowPad;
  const int sequence = blockIdx.x / tiles, first_row = blockIdx.x % tiles * kRowPad;
  const int head = sequence % params.attention.heads, batch = sequence / params.attention.heads;
  convert_rows(params, dq_acc_g, scales_g, dq_g, batch, head, first_row, params.attention.sq,
               scratch_row(params, batch, head, first_row));
}
