// Attention forward over int8 keys: Q K^T on integer tensor cores, P V on those of float16 with float32 sums, or with
// float16 sums within a tile of keys (ACCUMULATOR, tensor_core/output_sums.cuh).
//
//   k^_j = scale_j * code_j + centre                         what attention/quantize_keys.cu made of k_j
//   q^_i = a_i * round(q_i / a_i),   a_i = max |q_i| / 127   (common/row_codes.cuh)
//   s_ij = softmax_scale * (a_i scale_j (codes of q_i) . code_j + q_i . centre) (+ options)
//   lse_i = log sum_j exp(s_ij),   out_i = sum_j exp(s_ij - lse_i) v_j
//
// The loop of tensor_core/forward.cu, whose softmax, options and epilogue it shares, with the first product after
// SageAttention (Zhang et al., arXiv:2410.02367): smoothed keys, one scale for each row. Turing multiplies int8 at
// twice the rate of float16, and at four times that of float16 with float32 sums on GeForce. Two mma.m8n8k16, of rows
// 0-7 and 8-15, leave the sums where mma.m16n8k8 of P V wants P. Sums need no conversion: they begin at the bits of
// 1.5 * 2^23, so that an int32 sum is a float already, and one FMA with the key's factors makes scale_j * sum of it.
//
// Shapes    AttentionParams (params.cuh) or VarlenParams, k of int8; scales (B, Sk, G) and centre (B, G, D) by
//           QuantizedKeysParams. HEAD_DIM is even, from 2 to 256, in steps of 16 columns, zero-filled.
// Tiles     kTileQ = WARPS * M_TILES * 16 query rows by TILE_K keys; a warp owns its rows alone.
// Grid      B * H * ceil(Sq / kTileQ) CTAs of WARPS warps; under causal order the longest rows start first.
// Budget    shared memory: K, its factors and V twice, and q . centre of each row; or Q or the output tile, which are
//           there before and after. Registers: codes of Q (M_TILES * D / 8), the accumulator (M_TILES * Dv / 2), sums.
// Barriers  three before the loop (Q written, Q read, the first tile written), one per key tile, and one before the
//           output.
// Edges     as tensor_core/forward.cu. A query with a NaN or an infinity has scale NaN, and so has a key: every score
//           of it is NaN. Rows of zeros have codes 0.
//
// Three entries share the loop: with ForwardParams for a batch, with VarlenParams for packed sequences, and with
// PagedParams for keys in the blocks of a cache (paged_attention). Shapes of the last are those of
// tensor_core/forward_paged.cu, with codes (num_blocks, block_size, G, D), scales (num_blocks, block_size, G) and one
// centre (G, D) for all blocks, since sequences share them.
#include "forward.cuh"

#if defined(PAGED_PARAMS_BYTES)
extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_int8_paged(const float16* q_g, const signed char* k_cache_g, const float* k_scales_g,
                                 const float* k_centre_g, const float16* v_cache_g, const int* block_table_g,
                                 const void* seqlens_k_g, const void* cu_seqlens_q_g, const void* alibi_slopes_g,
                                 const void* sinks_g, float16* out_g, float* lse_g, const PagedParams params,
                                 const QuantizedKeysParams quantized) {
  TileCoordinates coords;
  if (!coordinates_of_cta(coords, params, cu_seqlens_q_g, Traits::kTileQ)) return;
  const AttentionParams& attention = params.attention;
  const int64 q_offset = query_offset(params, seqlens_k_g, coords);
  const KeyWindow window(q_offset, attention.left, attention.right, keys_in_use(attention, seqlens_k_g, coords.batch));
  const int rows = min(Traits::kTileQ, coords.sq - coords.first_row);
  using Loader = QuantizedBlockLoader<Traits::KTileLoader, Traits::VTileLoader>;
  const auto make_loader = [&](const LoopTiles& tiles) {
    const typename Loader::Groups groups(params, block_table_g, coords, window, rows);
    return Loader(attention, quantized, groups, coords, k_cache_g, k_scales_g, v_cache_g, tiles);
  };
  attend(attention,
         {q_g, k_centre_g + coords.kv_head * quantized.centre_head, out_g, lse_g, nullptr, nullptr, alibi_slopes_g,
          sinks_g},
         coords, window, q_offset, make_loader);
}
#else
#include "../sequences.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    ENTRY(attention_forward_int8)(const float16* q_g, const signed char* k_g, const float* k_scales_g,
                                  const float* k_centre_g, const float16* v_g, float16* out_g,
                                  float* lse_g PACKED_ARRAYS, const void* q_offsets_g, const void* seqused_k_g,
                                  const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                  const void* sinks_g, const ForwardParams params,
                                  const QuantizedKeysParams quantized MODIFIER_STRIDES) {
  const Modifiers modifiers = MODIFIERS;
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K, q_offsets_g, seqused_k_g});
  const CtaQueries<Traits::kTileQ, Traits::kTileK> own(sequences, modifiers.blocks, dynamic_shared<Smem>());
  if (!own.exist()) return;
  const AttentionParams& attention = sequences.attention;
  const TileCoordinates coords = own.coords();
  const float* centre_g = k_centre_g + coords.batch * quantized.centre_batch + coords.kv_head * quantized.centre_head;
  const auto make_loader = [&](const LoopTiles& tiles) {
    return QuantizedKeyLoader<Traits::KTileLoader, Traits::VTileLoader>(
        attention, quantized, coords, rows_from(k_g, attention.k, own.keys()),
        rows_from(k_scales_g, quantized.scales, own.keys()), rows_from(v_g, attention.v, own.keys()), tiles);
  };
  attend(attention, {q_g, centre_g, out_g, lse_g, bias_g, mask_g, slopes_g, sinks_g, modifiers}, coords, own.window(),
         own.q_offset(), make_loader);
}
#endif
