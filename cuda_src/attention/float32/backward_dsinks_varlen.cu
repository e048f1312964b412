// Attention backward of packed sequences in float32 arithmetic, last step: the gradient of the sinks.
//
//   dsinks_h = - sum over sequences and rows of exp(sink_h - lse) delta
//
// (backward_dsinks.cu has the same of a batch.)
//
// Shapes    VarlenBackwardParams (../varlen_backward_params.cuh), which also says how delta lies; sinks and dsinks (H,).
// Work      one CTA of THREADS threads a head, grid H. The order of the additions is fixed.
// Edges     no queries give 0; a row without keys and with a sink of -inf weighs nothing.
#if !defined(SINKS) || !defined(THREADS)
#error "SINKS and THREADS come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../varlen_backward_params.cuh"
#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_f32_dsinks_varlen(const float* lse_g, const float* delta_g, const SINKS* sinks_g,
                                         SINKS* dsinks_g, const void* cu_seqlens_q_g,
                                         const VarlenBackwardParams params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const BackwardParams& backward = params.backward;
  const AttentionParams& forward = backward.attention;
  const PackedRows queries = packed_queries(params.packed, forward, {cu_seqlens_q_g});
  const int head = blockIdx.x;
  const float sink_log2 = to_float(sinks_g[head * forward.scores.sinks_stride]) * kLog2E;

  float sum = 0.f;
  for (int batch = 0; batch < queries.batch; batch++) {
    const RowSpan rows = queries.of(batch);
    const float* delta_rows_g =
        delta_g + static_cast<int64>(rows.begin) * forward.heads + static_cast<int64>(head) * rows.count;
    for (int row = threadIdx.x; row < rows.count; row += THREADS) {
      const RowSums sums(*head_rows(lse_g, forward.lse, batch, head, rows.begin + row), delta_rows_g[row]);
      sum -= sums.weight(sink_log2) * sums.delta;
    }
  }
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  if (threadIdx.x == 0) store_gradient(dsinks_g + head * backward.dsinks_stride, sum, backward);
}
