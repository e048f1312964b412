// Attention forward on the tensor cores of sm_80 and later: float16 or bfloat16 in and out, float32 accumulation.
//
//   s_ij = softmax_scale * q_i . k_j (+ options),   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// FlashAttention-2's loop (Dao, arXiv:2307.08691, algorithm 1) as tensor_core/forward.cu has it for Turing, whose
// masks, options and epilogue it shares. Different are: K and V pass no register on their way to shared memory
// (cp.async), one tile ahead; both products take 16 columns or keys in one instruction (mma.m16n8k16), of which
// neighbouring fragments of P are an operand as they are; P is packed by a conversion (softmax.cuh), so bfloat16 has
// tensor cores as well. Where the keys of a step lie on one side of all of a warp's rows, ALiBi is a sum:
//
//   -slope |i - j| = -slope |i - j0| + side slope (j - j0),   j0 a thread's first key, side 1 before the rows, -1 after
//
// The first term shifts the row's maximum, and all rows share the multiples of the slope in the second.
//
// Shapes    AttentionParams (params.cuh), or VarlenParams (varlen_params.cuh): packed sequences (sequences.cuh).
//           HEAD_DIM and HEAD_DIM_V from 1 to 256 in steps of 8 columns, zero-filled. DTYPE is that of q, k, v and out.
// Tiles     kTileQ = WARPS * M_TILES * 16 query rows by TILE_K keys, in STEPS softmaxes; a warp owns its rows alone.
// Grid      B * H * ceil(Sq / kTileQ) CTAs (cooperative thread arrays: blocks of threads) of WARPS warps; under
//           causal order the longest rows start first.
// Budget    shared memory: K and V twice; Q next to them (Q_SHARED), or in the place of the second tile before the
//           loop; registers: Q (M_TILES * D / 4) unless it is shared, the accumulator (M_TILES * Dv / 2), the scores.
// Barriers  one per key tile: this tile has been written, the one before it read.
// Edges     rows beyond Sq are zeros and not stored; keys beyond the sequence are zeros and masked; a row without keys
//           gives out = 0 and lse = -inf, or its sink. Rows of packed arrays that belong to no sequence are not
//           touched. Rows that are not whole chunks of 16 bytes (VEC = 1) pass registers, item by item.
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "../sequences.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_forward_native)(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, DTYPE* out_g,
                                    float* lse_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
                                    const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                    const void* sinks_g, const ForwardParams params MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kTileQ, Traits::kTileK> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  if (!own.exist()) return;
  const AttentionParams& attention = sequences.attention;
  attend(attention, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, modifiers},
         DenseTiles<DTYPE>{rows_from(k_g, attention.k, own.keys()), rows_from(v_g, attention.v, own.keys())},
         own.coords(), own.window(), own.q_offset());
}
