// A row operation for the tests of the mechanism: rows of x less their mean, times a weight for each column, backward.
//
//   g_i = dout_i w_i,   dx_i = scale (g_i - mean_j g_j),   mean = mean_j x_j,
//   dweight_i = sum over rows of dout_i (x_i - mean)
//
// Shapes    dout, x and dx of any rank; weight and dweight (length,); mean (rows,) float32 (rows.cuh).
// Work      LANES threads own a row; a CTA walks rows gridDim.x * kRowsPerCta apart and leaves partial sums of dweight.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || !defined(RESIDENT)
#error "DTYPE, THREADS, LANES, STRIPS, VEC and RESIDENT come from a launch-configuration table"
#endif
#include "common/rows.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<4>;
enum Array { kDout, kX, kDx, kMean };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    centre_backward(const Scalar* dout_g, const Scalar* x_g, const Scalar* weight_g, Scalar* dx_g, float* mean_g,
                    float* partials_g, float scale, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  __shared__ float columns_s[ColumnSums<Rows>::kSharedFloats];
  ColumnSums<Rows> sums;
  float* partial_row_g = partials_g + blockIdx.x * params.length;
  const int64 step = static_cast<int64>(gridDim.x) * Rows::kRowsPerCta;
  const int64 first = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta);

  for (int64 start = first; start < params.rows; start += step) {
    const int64 row = start + threadIdx.x / Rows::kLanes;
    const bool exists = row < params.rows;  // rows beyond the last take part with no columns
    const int64 length = exists ? params.length : 0, segments = Rows::segments(params.length);
    const Scalar* dout_row_g = dout_g + row_offset(params, kDout, exists ? row : 0);
    const Scalar* x_row_g = x_g + row_offset(params, kX, exists ? row : 0);
    Scalar* dx_row_g = dx_g + row_offset(params, kDx, exists ? row : 0);

    // Phase 1: the means of x and of dout * weight.
    float x_sum = 0.f, g_sum = 0.f;
#pragma unroll Rows::kHeldSegments
    for (int64 segment = 0; segment < segments; segment++) {
      float x[Rows::kVec], dout[Rows::kVec], weight[Rows::kVec];
      load_segment<Rows>(x, x_row_g, segment, length, 0.f);
      load_segment<Rows>(dout, dout_row_g, segment, length, 0.f);
      load_segment<Rows>(weight, weight_g, segment, length, 0.f);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) x_sum += x[i], g_sum += dout[i] * weight[i];
    }
    const float x_mean = row_reduce<Sum, Rows>(x_sum, partial_s) / params.length;
    const float g_mean = row_reduce<Sum, Rows>(g_sum, partial_s) / params.length;
    if (exists && threadIdx.x % Rows::kLanes == 0) mean_g[row_offset(params, kMean, row)] = x_mean;

    // Phase 2: dx, and this row's terms of dweight.
#pragma unroll Rows::kHeldSegments
    for (int64 segment = 0; segment < segments; segment++) {
      float x[Rows::kVec], dout[Rows::kVec], weight[Rows::kVec];
      load_segment<Rows>(x, x_row_g, segment, length, x_mean);
      load_segment<Rows>(dout, dout_row_g, segment, length, 0.f);
      load_segment<Rows>(weight, weight_g, segment, length, 0.f);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        x[i] = dout[i] * (x[i] - x_mean);
        dout[i] = scale * (dout[i] * weight[i] - g_mean);
      }
      store_segment<Rows>(dx_row_g, dout, segment, length);
      sums.add(x, segment, start == first, partial_row_g, length);
    }
  }
  sums.store(partial_row_g, params.length, columns_s);
}
