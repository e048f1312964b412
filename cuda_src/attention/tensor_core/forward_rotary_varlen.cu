// Attention forward of packed sequences on tensor cores, of a call with rotary embedding: the walk of forward_varlen.cu,
// whose query rows are rotated as in forward_rotary.cu. Keys were rotated before (../rotary_varlen.cu).
//
// Shapes    as forward_varlen.cu; cos and sin (positions, R/2) of TABLE, RotaryTables (rotated_chunks.cuh).
// Work      as forward.cu.
// Grid      as forward_varlen.cu.
// Budget    as forward.cu.
// Edges     as forward_varlen.cu and forward_rotary.cu. Positions begin anew in each sequence.
#include "forward.cuh"
#include "rotated_chunks.cuh"
#include "../varlen_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_rotary_varlen(const float16* q_g, const float16* k_g, const float16* v_g, float16* out_g,
                                    float* lse_g, const void* cu_seqlens_q_g, const void* cu_seqlens_k_g,
                                    const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                    const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, const void* sinks_g,
                                    const TABLE* cos_g, const TABLE* sin_g, const VarlenParams params,
                                    const RotaryTables tables MODIFIER_STRIDES) {
  const AttentionParams& attention = params.attention;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  const PackedWork work = queries_of_cta(params.packed, attention, pointers, Traits::kTileQ, shared_memory());
  if (!work.exists()) return;
  const PackedSequence& sequence = work.sequence;
  const Place place = query_place(work, attention, Traits::kTileQ);
  attend(attention, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, MODIFIERS}, place,
         sequence.window(attention), sequence.q_offset,
         DenseKeys{attention, rows_from(k_g, attention.k, sequence.keys), rows_from(v_g, attention.v, sequence.keys)},
         RotatedChunks<Traits::kHeadDim, Traits::kVec>{cos_g, sin_g, tables, sequence.q_offset + place.first_row});
}
