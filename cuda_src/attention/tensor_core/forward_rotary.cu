// Attention forward on tensor cores of a call with rotary embedding: the loop of forward.cu, whose query rows are
// rotated as they are loaded, of packed sequences too. Keys were rotated before (../rotary.cu).
//
//   Of K every CTA of a head would rotate each tile again. Done between the loads and the stores to shared memory, half
//   the features of a pair from the same thread, by shuffles or by another load, that models 0.57, 0.56 and 0.65 at
//   head dims 64, 80 and 128 on a T4, where forward.cu has 0.87, 0.84 and 0.89 (python -m cupyattn turing, 2026-11-22).
//
// Shapes    as forward.cu; cos and sin (positions, R/2) of TABLE, RotaryTables (rotated_chunks.cuh).
// Work      as forward.cu.
// Grid      as forward.cu.
// Budget    as forward.cu.
// Edges     as forward.cu; a query outside of the tables has NaN in its R features, which is hidden
//           where it sees no key. Positions begin at 0 in each packed sequence.
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "rotated_chunks.cuh"
#include "../sequences.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_forward_rotary)(const float16* q_g, const float16* k_g, const float16* v_g, float16* out_g,
                                    float* lse_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
                                    const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                    const void* sinks_g, const TABLE* cos_g, const TABLE* sin_g,
                                    const ForwardParams params, const RotaryTables tables MODIFIER_STRIDES) {
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kTileQ, Traits::kTileK> own(sequences, NoBlocks{}, dynamic_shared<Smem>());
  if (!own.exist()) return;
  const AttentionParams& attention = sequences.attention;
  const TileCoordinates coords = own.coords();
  const KeyWindow window = own.window();
  const int64 q_offset = own.q_offset();
  attend(attention, {q_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, MODIFIERS}, coords, window, q_offset,
         DenseKeys{attention, rows_from(k_g, attention.k, own.keys()), rows_from(v_g, attention.v, own.keys())},
         RotatedChunks<Traits::kHeadDim, Traits::kVec>{cos_g, sin_g, tables, q_offset + coords.first_row});
}
