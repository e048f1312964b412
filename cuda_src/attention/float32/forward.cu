// Attention forward in float32 arithmetic: the flash kernel of float32 and bfloat16, for which Turing has no tensor
// cores, and of float16 on GPUs that have none.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention-2's loop (Dao, arXiv:2307.08691, algorithm 1) as two register-tiled matrix products. A thread owns 8
// rows by 2 PAIRS keys of S and 8 rows by Dv / COLUMN_LANES columns of the output, so that 16 loads of 16 bytes from
// shared memory feed 256 multiplications: shared memory would bind with less. Q and K of that many rows do not fit
// at the same time; they pass through shared memory in slices of 16 columns, Q again for each key tile, and V in
// panels of 16 keys. Above head dim 256 a thread owns 4 rows, whose outputs fill its registers, and a panel has 8 keys.
//
// Shapes    AttentionParams (params.cuh), or VarlenParams (varlen_params.cuh): packed sequences (sequences.cuh).
//           HEAD_DIM and HEAD_DIM_V from 1 to 512. float32 inside, one rounding at the store.
// Tiles     kTileQ = WARPS * kWarpRows query rows by kTileK keys; a warp owns its rows alone, and P passes from the
//           layout of S to that of the output through shared memory of the warp's own.
// Grid      B * H * ceil(Sq / kTileQ) CTAs (cooperative thread arrays: blocks of threads) of WARPS warps; under
//           causal order the longest rows start first.
// Budget    shared memory: two buffers (one computed, one filled) and P; registers: S, the accumulator, m, l and what
//           is on the way to the next buffer.
// Barriers  one per buffer: ceil(D / 16) + 2 PAIRS * COLUMN_LANES / PANEL_KEYS a key tile, up to 1,024 multiplications
//           apart.
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked; a row without keys
//           gives out = 0 and lse = -inf, or its sink. Rows of packed arrays that belong to no sequence are not
//           touched.
#include "dense_keys.cuh"
#include "../sequences.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_forward, _f32)(const Traits::Scalar* q_g, const Traits::Scalar* k_g, const Traits::Scalar* v_g,
                                   Traits::Scalar* out_g, float* lse_g PACKED_ARRAYS, const void* q_offsets_g,
                                   const void* seqused_k_g, const void* bias_g, const void* mask_g,
                                   const void* slopes_g MODIFIER_ARRAYS, const void* sinks_g,
                                   const ForwardParams params MODIFIER_STRIDES) {
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
