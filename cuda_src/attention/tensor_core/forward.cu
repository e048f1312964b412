// Attention forward on tensor cores: float16 in and out, float32 accumulation; the last step of naive -> tiled ->
// flash.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention-2's loop (Dao, arXiv:2307.08691, algorithm 1), shaped for Turing, whose shared memory delivers half of
// what its tensor cores could consume: a warp owns 32 query rows (two m16 tiles), so that each fragment of K and V
// read from shared memory feeds two products; Q stays in registers; the softmax takes no maximum in the common case
// (softmax.cuh); tiles that need a mask are walked first (key_walk.cuh).
//
// Shapes    AttentionParams (params.cuh); HEAD_DIM and HEAD_DIM_V from 1 to 256 in steps of 8 columns, zero-filled.
// Tiles     kTileQ = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone.
// Grid      B * H * ceil(Sq / kTileQ) CTAs (cooperative thread arrays: blocks of threads) of WARPS warps; under
//           causal order the longest rows start first.
// Budget    shared memory: K and V twice (one half computed, one half filled), or Q or the output tile, which are there
//           before and after; registers: Q (M_TILES * D / 4), the accumulator (M_TILES * Dv / 2), the scores.
// Barriers  one per key tile.
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked; a row without keys
//           gives out = 0 and lse = -inf, or its sink.
#include "forward.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward(const float16* q_g, const float16* k_g, const float16* v_g, float16* out_g, float* lse_g,
                      const void* q_offsets_g, const void* seqused_k_g, const void* bias_g, const void* mask_g,
                      const void* slopes_g MODIFIER_ARRAYS, const void* sinks_g,
                      const AttentionParams params MODIFIER_STRIDES) {
  // Under causal order later rows see more keys: they start first. A block mask's lists have an order of their own.
  const Modifiers modifiers = MODIFIERS;
  const Place place = in_order_of_work<Traits::kTileQ, Traits::kTileK>(
      place_of_cta(params, Traits::kTileQ, /*last_rows_first=*/!Modifiers::kBlocks), modifiers.blocks);
  const KeyWindow window = sequence_window(params, q_offsets_g, seqused_k_g, place.batch);
  attend(params, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, modifiers}, place, window,
         query_offset(params, q_offsets_g, place.batch), DenseKeys{params, k_g, v_g});
}
