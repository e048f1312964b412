// Attention backward of packed sequences for float32 and bfloat16: the gradients of keys and values, and with ONE_PASS of
// queries as well, as backward_dkdv.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh).
// Work      as backward_dkdv.cu.
// Grid      G times as many CTAs as any lengths could need tiles, of which those beyond return; the longest sequences
//           start first (../packed_rows.cuh).
// Budget    as backward_dkdv.cu.
// Edges     as backward_dkdv.cu; keys of a sequence without queries get zeros.
#include "backward_dkdv.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dkdv_varlen(const Traits::Scalar* dout_g, const Traits::Scalar* q_g,
                                       const Traits::Scalar* k_g, const Traits::Scalar* v_g, const float* lse_g,
                                       const float* delta_g, const void* cu_seqlens_q_g, const void* cu_seqlens_k_g,
                                       const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                       const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, float* dq_g,
                                       Traits::Scalar* dk_g, Traits::Scalar* dv_g, void* dbias_g,
                                       const VarlenBackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& longest = params.backward.attention;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  const PackedWork work = keys_of_cta(params.packed, longest, pointers, Traits::kTileK, shared_memory());
  if (!work.exists()) return;
  const PackedSequence& sequence = work.sequence;
  const BackwardParams own = of_sequence(params.backward, sequence);
  const RowSpan &queries = sequence.queries, &keys = sequence.keys;
  add_up_gradients(own,
                   {rows_from(dout_g, own.dout, queries), rows_from(q_g, longest.q, queries),
                    rows_from(k_g, longest.k, keys), rows_from(v_g, longest.v, keys),
                    rows_from(lse_g, longest.lse, queries), delta_g + static_cast<int64>(queries.begin) * longest.heads,
                    bias_g, mask_g, slopes_g, rows_from(dq_g, own.dq, queries), rows_from(dk_g, own.dk, keys),
                    rows_from(dv_g, own.dv, keys), dbias_g, MODIFIERS},
                   key_place(work.tile, Traits::kTileK), sequence.window(longest), sequence.q_offset);
}
