// Attention of many query tokens over a paged cache on tensor cores: a prompt, or a chunk of one. The loop of
// forward.cu with another loader of keys (PagedAttention, Kwon et al., arXiv:2309.06180).
//
// Shapes    PagedParams (../paged_params.cuh); HEAD_DIM_V is HEAD_DIM.
// Caches    DTYPE, or integers with a scale for each token and head (../stored_items.cuh), which become DTYPE on their
//           way to shared memory: the rest is the same.
// Work      as forward.cu; in addition every warp looks up the blocks of each tile, one tile ahead (../paged_keys.cuh).
// Grid      B * H * ceil(Sq / kTileQ) CTAs; of packed sequences H times as many as any lengths could need, of which
//           those beyond return: no length is read on the host.
// Budget    as forward.cu; the table takes registers alone.
// Edges     as forward.cu; keys beyond the sequence, and those that no row of the CTA sees, are not read, and of the
//           table nothing after the last one that is. A sequence without queries has no CTA.
#if !defined(CACHE)
#error "CACHE comes from a launch-configuration table"
#endif
#if HEAD_DIM <= 256 && HEAD_DIM_V <= 256
#include "forward.cuh"
#else
#include "forward_wide.cuh"
#endif
#include "paged_loader.cuh"

extern "C" __global__ void __launch_bounds__(Traits::kThreads, MIN_CTAS)
    attention_forward_paged(const DTYPE* q_g, const CACHE* k_cache_g, const CACHE* v_cache_g, const int* block_table_g,
                            const void* seqlens_k_g, const void* cu_seqlens_q_g, const float* k_scales_g,
                            const float* v_scales_g, const void* alibi_slopes_g, const void* sinks_g, DTYPE* out_g,
                            float* lse_g, const PagedParams params) {
  TileCoordinates coords;
  if (!coordinates_of_cta(coords, params, cu_seqlens_q_g, Traits::kTileQ)) return;
  const AttentionParams& attention = params.attention;
  const int64 q_offset = query_offset(params, seqlens_k_g, coords);
  const KeyWindow window(q_offset, attention.left, attention.right, keys_in_use(attention, seqlens_k_g, coords.batch));
  attend(attention, {q_g, out_g, lse_g, nullptr, nullptr, alibi_slopes_g, sinks_g}, coords, window, q_offset,
         PagedKeys<CACHE>{params, k_cache_g, v_cache_g, k_scales_g, v_scales_g, block_table_g});
}
