// Attention backward in float32 arithmetic throughout, of every dtype: the gradients of keys and values, and with
// ONE_PASS of queries as well.
//
//   dv_j = sum_i p_ij dout_i,   dk_j = softmax_scale * sum_i ds_ij q_i,   dq_i = softmax_scale * sum_j ds_ij k_j
//
// (score_gradient.cuh). dQ sums over all keys, which other CTAs own: ONE_PASS adds each tile's part to dq itself by
// float32 atomics, in an order that differs from run to run, and spends five products; with attention_backward_f32_dq
// they are seven.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
//           ONE_PASS: dq is float32, and zero or what is added to; of other dtypes it is scratch memory.
// Tiles     TILE_K keys, which the CTA owns, by TILE_Q queries. All products, S and dP over the head dims, dV and dK
//           over the queries, dQ over the keys, are outer products from shared memory (backward_products.cuh), a step
//           at a time (backward_feed.cuh); a thread keeps its blocks of dK and dV in registers through the walk.
// Grid      B * G * ceil(Sk / TILE_K) CTAs of 128 threads; each walks the queries of all heads of its group that see
//           one of its keys.
// Budget    shared memory: two buffers, and P or dS, or a part of it; registers: dK and dV, and S and dP or, for 128
//           columns at a time, dQ: a 128th each.
// Barriers  one a step, one for each part of P or dS, and one before P.
// Edges     rows beyond the arrays are zeros and not stored; keys that no query sees give zeros. dbias, if given, has
//           every score's place: it is written here, where the score is seen.
#include "backward_dkdv.cuh"

extern "C" __global__ void __launch_bounds__(kProductThreads, MIN_CTAS)
    attention_backward_f32_dkdv(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                                const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, float* dq_g,
                                Traits::Scalar* dk_g, Traits::Scalar* dv_g, void* dbias_g,
                                const BackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& forward = params.attention;
  const Modifiers modifiers = MODIFIERS;
  const KeyPlace place =
      in_order_of_work<Traits::kTileQ>(forward, KeyPlace(forward, Traits::kTileK), Traits::kTileK, modifiers.blocks);
  const int64 q_offset = query_offset(forward, q_offsets_g, place.batch);
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, place.batch);
  add_up_gradients(
      params, {dout_g, q_g, k_g, v_g, lse_g, delta_g, bias_g, mask_g, slopes_g, dq_g, dk_g, dv_g, dbias_g, modifiers},
      place, window, q_offset);
}
