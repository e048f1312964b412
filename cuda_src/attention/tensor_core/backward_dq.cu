// Attention backward on tensor cores, second of two deterministic kernels: dQ.
//
//   P = exp(s - lse),  dS = P * (dout V^T - delta),  dQ = softmax_scale * dS K
//
// The forward's walk: a warp keeps its query rows, here Q and dout as A fragments in registers, and goes through the
// keys; S, dP and dS stay in registers, since dS, packed, is the A operand of dQ += dS K. What attention_backward_dkdv
// gathers by atomics is so summed in one order, for the price of computing S and dP again (7 products instead of 5).
//
// Shapes    BackwardParams (backward_params.cuh); head dims in steps of 8 columns, zero-filled.
// Tiles     kRows = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone. Tiles that need a mask
//           come first (key_walk.cuh); with FULL_LOOP the others have a loop of their own.
// Grid      B * H * ceil(Sq / kRows) CTAs; under causal order the longest rows start first.
// Budget    registers: Q and dout (M_TILES * (D + Dv) / 4) and dQ (M_TILES * D / 2). Shared memory: K and V twice (one
//           half computed, one half filled), or Q or dout before the walk.
// Barriers  one per key tile.
// Edges     rows beyond Sq have L = +inf, hence dS = 0, and are not stored; keys beyond the sequence are zeros and
//           masked.
#include "backward_dq.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_backward_dq(const float16* q_g, const float16* k_g, const float16* v_g, const float16* dout_g,
                          const float* statistics_g, const float* scales_g, float* cta_scales_g, float16* dq_g,
                          const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                          const void* slopes_g MODIFIER_ARRAYS, const BackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& attention = params.attention;
  // Under causal order later rows see more keys: they start first.
  const Modifiers modifiers = MODIFIERS;
  const Place place = in_order_of_work<Traits::kRows, Traits::kTileK>(
      place_of_cta(attention, Traits::kRows, /*last_rows_first=*/!Modifiers::kBlocks), modifiers.blocks);
  const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, place.batch);
  add_up_dq(
      params,
      {q_g,
       k_g,
       v_g,
       dout_g,
       statistics_g,
       dq_g,
       {bias_g, mask_g, slopes_g, nullptr, modifiers, {scales_g, cta_scales_g}}},
      place, window, [&] { return query_offset(attention, q_offsets_g, place.batch); }, place.batch);
}
