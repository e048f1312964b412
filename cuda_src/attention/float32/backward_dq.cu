// Attention backward in float32 arithmetic throughout, of every dtype: the gradient of the queries.
//
//   dq_i = softmax_scale * sum_j ds_ij k_j      (score_gradient.cuh)
//
// The same bits from run to run, where attention_backward_f32_dkdv with ONE_PASS adds atomically.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
// Tiles     TILE_Q queries, which the CTA owns, by TILE_K keys; products as in backward_dkdv.cu.
// Grid      B * H * ceil(Sq / TILE_Q) CTAs of 128 threads; under causal order the longest rows start first.
// Budget    shared memory: two buffers, and dS, or a part of it; registers: dQ, S and dP, a 128th each.
// Edges     rows beyond the arrays are zeros and not stored; a row without keys gives dq = 0.
#include "backward_dq.cuh"

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dq(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                              const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                              const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                              const void* slopes_g MODIFIER_ARRAYS, Traits::Scalar* dq_g,
                              const BackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& forward = params.attention;
  // Under causal order later rows see more keys: they start first.
  const Modifiers modifiers = MODIFIERS;
  const Place place = in_order_of_work<Traits::kTileQ, Traits::kTileK>(
      place_of_cta(forward, Traits::kTileQ, /*last_rows_first=*/!Modifiers::kBlocks), modifiers.blocks);
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, place.batch);
  add_up_dq(
      params, {dout_g, q_g, k_g, v_g, lse_g, delta_g, bias_g, mask_g, slopes_g, dq_g, modifiers}, place, window,
      [&] { return query_offset(forward, q_offsets_g, place.batch); }, place.batch);
}
