// Attention backward on tensor cores for head dims whose keys, values and gradients of 16 keys exceed one warp's
// registers: dK and dV, and with ONE_PASS dQ as well, as attention_backward_dkdv computes them (see there).
//
// Here two warps share 16 keys. One keeps K and dK and reads Q: S^T = K Q^T, dK += dS^T Q. The other keeps V and dV and
// reads dout: dP^T = V dout^T, P and dS from both, dV += P^T dout. S^T goes from the one to the other through shared
// memory, dS^T, which dQ needs there anyway, back. While one turns scores into gradients, the other has products to do.
//
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS / 2 * 16 keys by TILE_Q queries, 16 queries at a time. Warps 0 to WARPS / 2 - 1 have the
//           keys, the others the values: a pair sits on one sub-partition of the SM. All share out the dQ tile.
// Grid      B * G * ceil(Sk / kKeys) CTAs; each walks the query tiles of all query heads of its group.
// Budget    registers: K and dK, or V and dV: 3 / 4 of the head dim. Shared memory: K (ONE_PASS), dS^T, S^T and the
//           tiles of Q and dout (two of each without ONE_PASS).
// Barriers  two per query tile, one without ONE_PASS; and two of each pair per 16 queries.
// Edges     as attention_backward_dkdv.
#include "backward_dkdv_paired.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dkdv_paired(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                                   const float* statistics_g, const float* scales_g, float* cta_scales_g,
                                   float* dq_acc_g, float16* dk_g, float16* dv_g, void* dbias_g,
                                   const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                   const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                   const BackwardParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const KeyPlace place = in_order_of_work<Traits::kTileQ>(params.attention, KeyPlace(params.attention, Traits::kKeys),
                                                          Traits::kKeys, modifiers.blocks);
  const KeyWindow window = sequence_window(params.attention, q_offsets_g, seqused_k_g, place.batch);
  add_up_gradients(
      params,
      {q_g,
       k_g,
       v_g,
       dout_g,
       statistics_g,
       dq_acc_g,
       {bias_g, mask_g, slopes_g, dbias_g, modifiers, {scales_g, cta_scales_g}}},
      place, window, [&] { return query_offset(params.attention, q_offsets_g, place.batch); },
      [&] { return KeyGradients{params.attention.sk, dk_g, dv_g}; });
}
