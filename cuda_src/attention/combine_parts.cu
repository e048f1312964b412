// The end of a forward whose keys were split: the parts of each query's row are added up, exactly (row_sum.cuh).
//
// Shapes    SplitParams (key_parts.cuh), whose cuts are worked out again from the window; scratch (B, H, Sq, splits,
//           Dv) and (B, H, Sq, splits, 2) float32.
// Work      a warp a row (sequence, head, query); grid ceil(rows / warps).
// Budget    registers for a row over the lanes, and for eight parts on the way.
// Edges     a row that sees no key has no part: out = 0 and lse = -inf, or its sink. In a part that the other rows of
//           its tile see, a row may have l = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM_V) || !defined(SINKS) || !defined(TILE_Q) || !defined(TILE_K) || \
    !defined(THREADS)
#error "DTYPE, HEAD_DIM_V, SINKS, TILE_Q, TILE_K, THREADS come from a launch-configuration table"
#endif
#include "key_parts.cuh"
#include "row_sum.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_combine_parts(const void* __restrict__ q_offsets_g, const void* __restrict__ seqused_k_g,
                            const void* __restrict__ sinks_g, const float* __restrict__ partial_out_g,
                            const float* __restrict__ partial_sums_g, DTYPE* __restrict__ out_g,
                            float* __restrict__ lse_g, const SplitParams params) {
  const AttentionParams& attention = params.attention;
  const int64 row = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int query = static_cast<int>(row % attention.sq);
  const int head = static_cast<int>(row / attention.sq % attention.heads);
  const int64 batch = row / attention.sq / attention.heads;
  if (batch >= params.batch) return;

  const KeyWindow window = sequence_window(attention, q_offsets_g, seqused_k_g, static_cast<int>(batch));
  const int first_row = query / TILE_Q * TILE_Q;
  const KeyLoop<TILE_K> loop(window, first_row, min(TILE_Q, attention.sq - first_row));
  const int parts = KeyCut<TILE_Q, TILE_K>(params, window).parts(loop);

  RowSum<HEAD_DIM_V> sum;
  sum.add_parts(
      0, parts - 1, 1, [&](int part) { return row * params.splits + part; }, partial_out_g,
      reinterpret_cast<const float2*>(partial_sums_g));
  sum.write<SINKS>(attention, static_cast<int>(batch), head, query, sinks_g, out_g, lse_g);
}
