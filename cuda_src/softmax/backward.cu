// Softmax over the last axis, or its logarithm, backward: from dout (dL/dy) and the forward's result y.
//
//   dx_j = scale y_j (dout_j - sum_i y_i dout_i)   or with LOGARITHM   dx_j = scale (dout_j - exp(y_j) sum_i dout_i)
//
// With ACCUMULATE dx_j is added to the contents of dx. y contains the mask and the bias of the forward: a hidden column
// is 0, or with LOGARITHM -inf, and its dout does not count.
//
// Shapes    dout, y and dx of any rank and any outer strides, last axis contiguous; the sum over i, one float32 a row,
//           if it is wanted (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: 2 * STRIPS * VEC floats of the row; shared memory: one float per warp.
// Edges     columns beyond the row count as zeros; a row of zeros (-inf, with LOGARITHM) in y gives zeros.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(LOGARITHM) || !defined(ACCUMULATE) || !defined(WITH_ROW_SUM)
#error \
    "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT, LOGARITHM, ACCUMULATE, WITH_ROW_SUM come from a launch-configuration table"
#endif
#include "../common/rows.cuh"
#include "gradient.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<4>;
enum Array { kDout, kY, kDx, kRowSum };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

struct Batch {
  float dout[Rows::kSegments][Rows::kVec], y[Rows::kSegments][Rows::kVec];

  __device__ __forceinline__ void load(const Scalar* dout_row_g, const Scalar* y_row_g, int64 batch, int64 length) {
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
      load_segment<Rows>(dout[segment], dout_row_g, batch * Rows::kSegments + segment, length, 0.f);
      load_segment<Rows>(y[segment], y_row_g, batch * Rows::kSegments + segment, length, 0.f);
    }
  }

  // This thread's part of the row's sum.
  __device__ __forceinline__ float sum() const {
    float sum[Rows::kVec] = {};  // columns apart, so that no addition waits for the one before it
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        sum[i] += LOGARITHM ? (y[segment][i] == -kInfinity ? 0.f : dout[segment][i]) : y[segment][i] * dout[segment][i];
      }
    }
    float total = sum[0];
#pragma unroll
    for (int i = 1; i < Rows::kVec; i++) total += sum[i];
    return total;
  }

  __device__ __forceinline__ void store_dx(Scalar* dx_row_g, int64 batch, int64 length, float row_sum,
                                           float scale) const {
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
      float dx[Rows::kVec];
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        dx[i] = scale * softmax_gradient<LOGARITHM>(dout[segment][i], y[segment][i], row_sum);
      }
      store_segment<Rows, ACCUMULATE>(dx_row_g, dx, batch * Rows::kSegments + segment, length);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_backward(const Scalar* dout_g, const Scalar* y_g, Scalar* dx_g, float* row_sum_g, float scale,
                     const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 row = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = row < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Scalar* dout_row_g = dout_g + row_offset(params, kDout, exists ? row : 0);
  const Scalar* y_row_g = y_g + row_offset(params, kY, exists ? row : 0);
  Scalar* dx_row_g = dx_g + row_offset(params, kDx, exists ? row : 0);
  const int64 length = exists ? params.length : 0;

  // Phase 1: the row's sum.
  Batch batch_r;
  float row_sum = 0.f;
  for (int64 batch = 0; batch < Rows::batches(length); batch++) {
    batch_r.load(dout_row_g, y_row_g, batch, length);
    row_sum += batch_r.sum();
  }
  row_sum = row_reduce<Sum, Rows>(row_sum, partial_s);
  if constexpr (WITH_ROW_SUM) {
    if (exists && threadIdx.x % Rows::kLanes == 0) row_sum_g[row_offset(params, kRowSum, row)] = row_sum;
  }

  // Phase 2: dx, from the registers or a second read.
  for (int64 batch = 0; batch < Rows::batches(length); batch++) {
    if (!Rows::kResident) batch_r.load(dout_row_g, y_row_g, batch, length);
    batch_r.store_dx(dx_row_g, batch, length, row_sum, scale);
  }
}
