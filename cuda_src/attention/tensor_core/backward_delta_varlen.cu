// Attention backward of packed sequences, before the tensor-core kernels: as backward_delta.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh).
// Work      as backward_delta.cu; grid H * rows_padded / (THREADS / ROW_LANES), and behind that G * keys_padded / (THREADS
//           / ROW_LANES). Each warp looks for its sequence, 32 at a time.
// Budget    as backward_delta.cu.
// Edges     as backward_delta.cu; rows of the scratch that belong to no sequence get L = +inf and delta = 0 too.
#include "backward_delta.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_delta_varlen(const float16* out_g, const float16* dout_g, const float* lse_g,
                                    const float* dlse_g, const float16* v_g, float* statistics_g, float* sizes_g,
                                    float* zeroed_g, const void* cu_seqlens_q_g, const void* cu_seqlens_k_g,
                                    const void* seqused_k_g, const VarlenBackwardParams params) {
  const BackwardParams& backward = params.backward;
  const AttentionParams& longest = backward.attention;
  clear_scratch(zeroed_g, backward.zeroed);

  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, nullptr, seqused_k_g};
  const int64 flat = static_cast<int64>(blockIdx.x) * Traits::kRows + threadIdx.x / Traits::kRowLanes;
  const int64 rows_of_all = scratch_rows(backward);
  Sizes sizes;
  if (flat < rows_of_all) {
    const PackedRows queries = packed_queries(params.packed, longest, pointers);
    const int scratch = flat % backward.rows_padded, head = flat / backward.rows_padded;
    const int batch = sequence_of_scratch(queries, scratch);
    const RowSpan rows = queries.of(batch);
    const int row = scratch - scratch_begin(rows, batch);
    sizes = write_statistics(backward, {out_g, dout_g, lse_g, dlse_g, statistics_g}, batch, head, rows.begin + row,
                             0 <= row && row < rows.count, scratch_row(backward, 0, head, scratch));
  } else {
    const int padded = padded_rows(params.packed.total_k, params.packed.batch);
    const int scratch = (flat - rows_of_all) % padded, kv_head = (flat - rows_of_all) / padded;
    const int batch = sequence_of_scratch(packed_keys(params.packed, longest, pointers), scratch);
    const PackedSequence sequence(params.packed, longest, pointers, batch);
    const int key = scratch - scratch_begin(sequence.keys, batch);
    sizes = value_sizes(head_rows(v_g, longest.v, batch, kv_head, sequence.keys.begin + key),
                        0 <= key && key < sequence.keys_in_use);
  }
  write_sizes(sizes_g, sizes);
}
