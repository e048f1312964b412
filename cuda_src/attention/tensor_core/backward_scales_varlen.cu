// Attention backward of packed sequences, between the rows' statistics and the products: as backward_scales.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh); scales (sequences, H, 2).
// Work      as backward_scales.cu.
// Budget    as backward_scales.cu.
// Edges     as backward_scales.cu.
#include "backward_scales.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    attention_backward_scales_varlen(const float* sizes_g, float* statistics_g, float* scales_g,
                                     const void* cu_seqlens_q_g, const void* cu_seqlens_k_g,
                                     const VarlenBackwardParams params) {
  const BackwardParams& backward = params.backward;
  const AttentionParams& longest = backward.attention;
  const int kv_heads = longest.heads / longest.group;
  const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, nullptr, nullptr};
  const RowSpan queries = packed_queries(params.packed, longest, pointers).of(batch);
  const RowSpan keys = packed_keys(params.packed, longest, pointers).of(batch);
  const int64 padded = padded_rows(params.packed.total_k, params.packed.batch);
  write_scale(backward, {sizes_g, statistics_g, scales_g}, batch, kv_head,
              scratch_row(backward, 0, kv_head * longest.group, scratch_begin(queries, batch)), queries.count,
              scratch_rows(backward) + kv_head * padded + scratch_begin(keys, batch), keys.count);
}
