// The first step of the float32 backward of packed sequences: what one query's scores share, as backward_delta.cu.
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh), which also says how delta lies.
// Work      a warp owns a row; grid ceil(H * total_q / (THREADS / 32)). Each looks for its sequence, 32 at a time.
//           ZEROED_DIM items of the row of dq become 0, to which one pass adds; the host does not know which rows.
// Edges     rows of no sequence are neither read nor written. dlse may be null.
#if !defined(DTYPE) || !defined(HEAD_DIM_V) || !defined(ZEROED_DIM) || !defined(THREADS)
#error "DTYPE, HEAD_DIM_V, ZEROED_DIM and THREADS come from a launch-configuration table"
#endif
#include "row_sums.cuh"
#include "../varlen_backward_params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_f32_delta_varlen(const DTYPE* dout_g, const DTYPE* out_g, const float* dlse_g, float* delta_g,
                                        float* dq_g, const void* cu_seqlens_q_g, const VarlenBackwardParams params) {
  const BackwardParams& backward = params.backward;
  const AttentionParams& forward = backward.attention;
  const PackedRows queries = packed_queries(params.packed, forward, {cu_seqlens_q_g});
  const int64 flat = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int packed_row = static_cast<int>(flat % params.packed.total_q);
  const int head = static_cast<int>(flat / params.packed.total_q);
  const int batch = queries.last_from_of_warp(packed_row, [&](int sequence) { return queries.of(sequence).begin; });
  const RowSpan rows = queries.of(batch);
  const int row = packed_row - rows.begin;
  if (head >= forward.heads || row < 0 || row >= rows.count) return;  // the whole warp
  float* to_g = delta_g + static_cast<int64>(rows.begin) * forward.heads + static_cast<int64>(head) * rows.count + row;
  store_delta<HEAD_DIM_V>(to_g, backward, dout_g, out_g, dlse_g, batch, head, packed_row);
  float* dq_row_g = head_rows(dq_g, backward.dq, batch, head, packed_row);
  for (int d = lane_index(); d < ZEROED_DIM; d += kWarpSize) dq_row_g[d] = 0.f;
}
