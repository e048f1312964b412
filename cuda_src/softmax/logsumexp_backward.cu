// The log-sum-exp of each row, backward: from dlse (dL/dlse) and the forward's result.
//
//   dx_j = scale dlse exp(s_j - lse)
//
// With ACCUMULATE dx_j is added to the contents of dx. Scores s are x with its options applied (row_scores.cuh).
//
// Shapes    x and dx of any rank and any outer strides, last axis contiguous; dlse and lse one float32 a row of any
//           strides (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats, whose loads are in flight together.
// Edges     columns that are not kept give 0, and so does a row whose lse is -inf.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(ACCUMULATE)
#error "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT and ACCUMULATE come from a launch-configuration table"
#endif
#include "row_scores.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<6>;
enum Array { kX, kDlse, kLse, kMask, kBias, kDx };
using Row = ScoreRow<Rows, Scalar, kX, kMask, kBias>;
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(!Rows::kResident, "a row is read once, and not kept");

extern "C" __global__ void __launch_bounds__(THREADS)
    logsumexp_backward(const Scalar* x_g, const float* dlse_g, const float* lse_g, const MASK_DTYPE* mask_g,
                       const BIAS_DTYPE* bias_g, Scalar* dx_g, int64 mask_stride, int64 bias_stride, float scale,
                       int64 queries, const Params params) {
  const int64 index = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  if (index >= params.rows) return;
  const Row row(x_g, {mask_g, bias_g, mask_stride, bias_stride, scale, queries}, params, index, true);
  Scalar* dx_row_g = dx_g + row_offset(params, kDx, index);
  const float dlse = dlse_g[row_offset(params, kDlse, index)], lse = lse_g[row_offset(params, kLse, index)];
  const float factor = scale * dlse;
  const float shift = lse == -kInfinity ? 0.f : lse;  // -inf - (-inf) is never formed

  for (int64 batch = 0; batch < Rows::batches(params.length); batch++) {
    float s[Rows::kSegments][Rows::kVec];
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) row.load(s[segment], batch * Rows::kSegments + segment);
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        // At most 1: an lse that was rounded to float32 may be below the score. A NaN stays NaN.
        const float weight = ex2_approx(at_most((s[segment][i] - shift) * kLog2E, 0.f));
        s[segment][i] = s[segment][i] == -kInfinity ? 0.f : factor * weight;
      }
      store_segment<Rows, ACCUMULATE>(dx_row_g, s[segment], batch * Rows::kSegments + segment, params.length);
    }
  }
}
