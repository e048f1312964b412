// Attention backward of packed sequences on tensor cores, first of two kernels: as backward_dkdv.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh).
// Work      as backward_dkdv.cu.
// Grid      G times as many CTAs as any lengths could need tiles, of which those beyond return; the longest sequences
//           start first (../packed_rows.cuh).
// Budget    as backward_dkdv.cu.
// Edges     as backward_dkdv.cu; keys of a sequence without queries get zeros.
#include "backward_dkdv.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dkdv_varlen(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                                   const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                   float* dq_acc_g, float16* dk_g, float16* dv_g, void* dbias_g,
                                   const void* cu_seqlens_q_g, const void* cu_seqlens_k_g, const void* q_offsets_g,
                                   const void* seqused_k_g, const void* bias_g, const void* mask_g,
                                   const void* slopes_g MODIFIER_ARRAYS,
                                   const VarlenBackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& longest = params.backward.attention;
  const PackedPointers pointers = {cu_seqlens_q_g, cu_seqlens_k_g, q_offsets_g, seqused_k_g};
  const PackedWork work = keys_of_cta(params.packed, longest, pointers, Traits::kKeys, shared_memory());
  if (!work.exists()) return;
  const PackedSequence& sequence = work.sequence;
  const BackwardParams own = of_sequence(params.backward, sequence);
  const RowSpan &queries = sequence.queries, &keys = sequence.keys;
  KeyPlace place = key_place(work.tile, Traits::kKeys);
  place.scratch_begin = scratch_begin(queries, work.tile.batch);
  add_up_gradients(
      own,
      {rows_from(q_g, longest.q, queries),
       rows_from(k_g, longest.k, keys),
       rows_from(v_g, longest.v, keys),
       rows_from(dout_g, own.dout, queries),
       statistics_g,
       dq_acc_g,
       {bias_g, mask_g, slopes_g, dbias_g, MODIFIERS, {scales_g, cta_scales_g}}},
      place, sequence.window(longest), [&] { return sequence.q_offset; },
      [&] {
        const RowSpan own_keys = packed_keys(params.packed, longest, pointers).of(place.batch);
        return KeyGradients{own_keys.count, rows_from(dk_g, own.dk, own_keys), rows_from(dv_g, own.dv, own_keys)};
      });
}
