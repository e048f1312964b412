// Attention backward in float32 arithmetic, last step: the gradient of the sinks.
//
//   dsinks_h = - sum_b sum_i exp(sink_h - lse_bhi) delta_bhi
//
// A sink is one more key of every query of its head, whose value is zero: its dp is 0, so its ds is -p delta.
//
// Shapes    lse (B, H, Sq) and delta, as backward_delta.cu leaves it, or both of packed sequences (sequences.cuh);
//           sinks and dsinks (H,).
// Work      one CTA of THREADS threads a head, grid H. The order of the additions is fixed.
// Edges     no queries give 0; a row without keys and with a sink of -inf weighs nothing.
#if !defined(SINKS) || !defined(THREADS)
#error "SINKS and THREADS come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../backward_sequences.cuh"
#include "row_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    ENTRY(attention_backward_f32_dsinks)(const float* lse_g, const float* delta_g, const SINKS* sinks_g,
                                         SINKS* dsinks_g PACKED_QUERIES, const GradientParams params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const BackwardParams& backward = backward_of(params);
  const Sequences sequences(params, {CU_SEQLENS_Q});
  const AttentionParams& forward = sequences.attention;
  const int head = blockIdx.x;
  const float sink_log2 = to_float(sinks_g[head * forward.scores.sinks_stride]) * kLog2E;

  float sum = 0.f;
  for (int batch = 0; batch < batch_of(params); batch++) {
    const RowSpan rows = sequences.queries(batch);
    const float* delta_rows_g = delta_rows(delta_g, forward, rows, batch, head);
    for (int row = threadIdx.x; row < rows.count; row += THREADS) {
      const RowSums sums(*head_rows(lse_g, forward.lse, batch, head, rows.begin + row), delta_rows_g[row]);
      sum -= sums.weight(sink_log2) * sums.delta;
    }
  }
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  if (threadIdx.x == 0) store_gradient(dsinks_g + head * backward.dsinks_stride, sum, backward);
}
