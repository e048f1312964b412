// Attention backward: the gradient of the sinks.
//
//   dsinks_h = -sum over batch and rows of exp(sink_h - lse) delta   (a sink is a score without a value: its dP is 0)
//
// Shapes    sinks, dsinks (H,); BackwardParams and the row statistics (backward_params.cuh), not scaled yet.
// Work      one CTA of THREADS threads owns one head: grid H. A thread takes two rows at a time, always the same ones
//           in the same order: the result is the same from run to run.
// Budget    one float per warp of shared memory; about 40 registers.
// Edges     padding rows have L = +inf and add 0.
#if !defined(DTYPE) || !defined(SINKS) || !defined(THREADS)
#error "DTYPE, SINKS and THREADS come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "row_statistics.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_dsinks(const SINKS* sinks_g, const float* statistics_g, SINKS* dsinks_g,
                              const BackwardParams params) {
  static_assert(THREADS % kWarpSize == 0 && THREADS <= 1024, "whole warps");
  __shared__ float partial_s[THREADS / kWarpSize];
  const int head = blockIdx.x;
  const float sink = to_float(sinks_g[head * params.attention.scores.sinks_stride]);
  const float shifted_sink_log2 = __fmaf_rn(sink, kLog2E, -kShiftedLog2);  // as the statistics L

  float sum = 0.f;
  for (int batch = 0; batch < params.batch; batch++) {
    const auto* rows_g =
        reinterpret_cast<const float4*>(statistics_g + statistics_offset(scratch_row(params, batch, head, 0)));
    for (int pair = threadIdx.x; pair < params.rows_padded / 2; pair += THREADS) {
      const float4 rows = rows_g[pair];  // L, L', delta, delta'
      sum = __fmaf_rn(ex2_approx(fminf(shifted_sink_log2 - rows.x, 0.f)), rows.z * kShifted, sum);
      sum = __fmaf_rn(ex2_approx(fminf(shifted_sink_log2 - rows.y, 0.f)), rows.w * kShifted, sum);
    }
  }
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  if (threadIdx.x == 0) {
    SINKS* item_g = dsinks_g + head * params.dsinks_stride;
    *item_g = from_float<SINKS>((params.accumulate ? to_float(*item_g) : 0.f) - sum);
  }
}
