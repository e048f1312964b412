// Attention forward of packed sequences in float32 arithmetic: the walk of forward.cu, whose rows and keys are those of
// one sequence among others in one array.
//
// Shapes    VarlenParams (../varlen_params.cuh).
// Work      as forward.cu.
// Grid      H times as many CTAs as any lengths could need tiles, of which those beyond return; the longest sequences
//           start first (../packed_rows.cuh).
// Budget    as forward.cu.
// Edges     as forward.cu; a sequence without queries has no CTA. Rows that belong to no sequence are not touched.
#include "dense_keys.cuh"
#include "../varlen_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_varlen_f32(const Traits::Scalar* q_g, const Traits::Scalar* k_g, const Traits::Scalar* v_g,
                                 Traits::Scalar* out_g, float* lse_g, const void* cu_seqlens_q_g,
                                 const void* cu_seqlens_k_g, const void* q_offsets_g, const void* seqused_k_g,
                                 const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                 const void* sinks_g, const VarlenParams params MODIFIER_STRIDES) {
  const AttentionParams& attention = params.attention;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  const PackedWork work = queries_of_cta(params.packed, attention, pointers, Traits::kTileQ, shared_memory());
  if (!work.exists()) return;
  const PackedSequence& sequence = work.sequence;
  const Place place = query_place(work, attention, Traits::kTileQ);
  const int64 begin = sequence.keys.begin;
  attend(attention, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, MODIFIERS}, place,
         sequence.window(attention), sequence.q_offset,
         DenseKeys{attention, k_g + begin * attention.k.seq, v_g + begin * attention.v.seq});
}
