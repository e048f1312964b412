// Attention forward from sm_80 on if there are too few tiles of query rows to fill the GPU: the loop of forward.cu, of
// which each of several CTAs has a part (../key_parts.cuh). ../combine_parts.cu adds the parts up.
//
// Shapes    SplitParams (../key_parts.cuh); scratch (B, H, Sq, splits, Dv) and (B, H, Sq, splits, 2) float32.
// Work      as forward.cu, without normalisation: sinks come in when the parts are added up.
// Grid      B * H * ceil(Sq / kTileQ) * splits CTAs; those without keys return.
// Budget    as forward.cu.
// Edges     as forward.cu; scratch of a part that no CTA has is not read.
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "../key_parts.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_native_split(const DTYPE* q_g, const DTYPE* k_g, const DTYPE* v_g, float* partial_out_g,
                                   float* partial_sums_g, const void* q_offsets_g, const void* seqused_k_g,
                                   const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                   const SplitParams params MODIFIER_STRIDES) {
  const AttentionParams& attention = params.attention;
  const TileCoordinates coords =
      coordinates_of_tile(attention, blockIdx.x / params.splits, Traits::kTileQ, /*last_rows_first=*/true);
  const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, coords.batch);
  const KeyCut<Traits::kTileQ, Traits::kTileK> cut(params, window);
  attend(attention, {q_g, nullptr, nullptr, bias_g, mask_g, slopes_g, nullptr, MODIFIERS}, DenseTiles<DTYPE>{k_g, v_g},
         coords, window, query_offset(attention, q_offsets_g, coords.batch),
         PartOfKeys{params, static_cast<int>(blockIdx.x % params.splits), cut.each, partial_out_g,
                    reinterpret_cast<float2*>(partial_sums_g)});
}
