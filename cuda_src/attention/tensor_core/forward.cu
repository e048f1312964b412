// Attention forward on tensor cores: float16 in and out, float32 accumulation; the last step of naive -> tiled ->
// flash.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention-2's loop (Dao, arXiv:2307.08691, algorithm 1), shaped for Turing, whose shared memory delivers half of
// what its tensor cores could consume: a warp owns 32 query rows (two m16 tiles), so that each fragment of K and V
// read from shared memory feeds two products; Q stays in registers; the softmax takes no maximum in the common case
// (softmax.cuh); tiles that need a mask come first (key_loop.cuh).
//
// Shapes    AttentionParams (params.cuh), or VarlenParams (varlen_params.cuh): packed sequences (sequences.cuh).
//           HEAD_DIM and HEAD_DIM_V from 1 to 256 in steps of 8 columns, zero-filled.
// Tiles     kTileQ = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone.
// Grid      B * H * ceil(Sq / kTileQ) CTAs (cooperative thread arrays: blocks of threads) of WARPS warps; under
//           causal order the longest rows start first.
// Budget    shared memory: K and V twice (one half computed, one half filled), or Q or the output tile, which are there
//           before and after; registers: Q (M_TILES * D / 4), the accumulator (M_TILES * Dv / 2), the scores.
// Barriers  one per key tile.
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked; a row without keys
//           gives out = 0 and lse = -inf, or its sink. Rows of packed arrays that belong to no sequence are not
//           touched.
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "../sequences.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_forward)(const float16* q_g, const float16* k_g, const float16* v_g, float16* out_g,
                             float* lse_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
                             const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                             const void* sinks_g, const ForwardParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kTileQ, Traits::kTileK> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  if (!own.exist()) return;
  const AttentionParams& attention = sequences.attention;
  const TileCoordinates coords = own.coords();
  attend(attention, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, modifiers}, coords, own.window(),
         own.q_offset(),
         DenseKeys{attention, rows_from(k_g, attention.k, own.keys()), rows_from(v_g, attention.v, own.keys())});
}
