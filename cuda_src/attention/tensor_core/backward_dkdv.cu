// Attention backward on tensor cores, first of two kernels: dK and dV, and with ONE_PASS dQ as well.
//
//   P = exp(s - lse),  dS = P * (dout V^T - delta)
//   dV = P^T dout,  dK = softmax_scale * dS^T Q,  dQ = softmax_scale * dS K
//
// FlashAttention-2's backward (Dao, arXiv:2307.08691, algorithm 2) with keys along the m16 side: a warp keeps its keys
// and values as A fragments in registers and forms S^T = K Q^T and dP^T = V dout^T, so that P^T and dS^T, packed, are
// the A operands of dV += P^T dout and dK += dS^T Q. Only dS^T goes through shared memory, for dQ, which is the sum
// over all CTAs of a head and is gathered by float32 atomics (ONE_PASS) or by attention_backward_dq (deterministic).
//
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kKeys = WARPS * M_TILES * 16 keys by TILE_Q queries, 8 * SUB_Q queries at a time; a warp owns its keys
//           alone and shares out the dQ tile by columns (DQ_ROW_WARPS: by rows too). With SCORE_VEC > 1 a warp's keys
//           lie in another order in shared memory and registers, so that a thread's are neighbours (score_tile.cuh).
// Grid      B * G * ceil(Sk / kKeys) CTAs; each walks the query tiles of all query heads of its group, so that dK and
//           dV are complete without a second pass.
// Budget    registers: K and V (M_TILES * (D + Dv) / 4), dK and dV (M_TILES * (D + Dv) / 2). Shared memory: K, dS^T and
//           one tile of Q and dout each; without ONE_PASS two tiles each, and no K and no dS^T.
// Barriers  two per query tile, one without ONE_PASS.
// Edges     queries beyond Sq have L = +inf, hence P = dS = 0; keys beyond the sequence are zeros and masked, and get
//           zeros as gradients.
#include "backward_dkdv.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dkdv(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                            const float* statistics_g, const float* scales_g, float* cta_scales_g, float* dq_acc_g,
                            float16* dk_g, float16* dv_g, void* dbias_g, const void* q_offsets_g,
                            const void* seqused_k_g, const void* bias_g, const void* mask_g,
                            const void* slopes_g MODIFIER_ARRAYS, const BackwardParams params MODIFIER_STRIDES) {
  // Heads of rows that are not aligned take no turns: with them the loop of head dim 128 spilled, and modelled 0.54
  // where it has 0.58 (NVRTC 12.9.86, 2026-11-22).
  const Modifiers modifiers = MODIFIERS;
  const KeyPlace place = in_order_of_work<Traits::kTileQ>(
      params.attention,
      KeyPlace(params.attention, Traits::kKeys, VEC == 1 ? 1 : params.attention.kv_together,
               VEC == 1 ? 1 : params.attention.batches),
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
