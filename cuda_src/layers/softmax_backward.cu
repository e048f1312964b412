// Softmax over the last axis, backward: from dout (dL/dy) and the forward's result y.
//
//   dx_i = y_i (dout_i - sum_j y_j dout_j)
//
// Shapes    dout, y and dx of any rank and any outer strides, last axis contiguous (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: 2 * STRIPS * VEC floats of the row (2 * VEC where it is not RESIDENT); shared memory: one float
//           per warp.
// Edges     columns beyond the row count as zeros; a row of zeros in y gives zeros.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || !defined(RESIDENT)
#error "DTYPE, THREADS, LANES, STRIPS, VEC and RESIDENT come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<3>;
enum Array { kDout, kY, kDx };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "cupyattn/kernels/structs.py describes another struct");

struct Strip {
  float dout[Rows::kVec], y[Rows::kVec];

  __device__ __forceinline__ void load(const Scalar* dout_row_g, const Scalar* y_row_g, int64 strip, int64 length) {
    load_strip<Rows>(dout, dout_row_g, strip, length, 0.f);
    load_strip<Rows>(y, y_row_g, strip, length, 0.f);
  }

  __device__ __forceinline__ float dot() const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) sum += y[i] * dout[i];
    return sum;
  }

  __device__ __forceinline__ void store_dx(Scalar* dx_row_g, int64 strip, int64 length, float row_dot) const {
    float dx[Rows::kVec];
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) dx[i] = y[i] * (dout[i] - row_dot);
    store_strip<Rows>(dx_row_g, dx, strip, length);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_backward(const Scalar* dout_g, const Scalar* y_g, Scalar* dx_g, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 row = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = row < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Scalar* dout_row_g = dout_g + row_offset(params, kDout, exists ? row : 0);
  const Scalar* y_row_g = y_g + row_offset(params, kY, exists ? row : 0);
  Scalar* dx_row_g = dx_g + row_offset(params, kDx, exists ? row : 0);
  const int64 length = exists ? params.length : 0;

  // Phase 1: sum_j y_j dout_j.
  const int64 strips = Rows::strips(length);
  Strip strips_r[Rows::kHeldStrips];
  float row_dot = 0.f;
#pragma unroll Rows::kHeldStrips
  for (int64 strip = 0; strip < strips; strip++) {
    strips_r[Rows::held(strip)].load(dout_row_g, y_row_g, strip, length);
    row_dot += strips_r[Rows::held(strip)].dot();
  }
  row_dot = row_reduce<Sum, Rows>(row_dot, partial_s);

  // Phase 2: dx, from the registers or a second read.
#pragma unroll Rows::kHeldStrips
  for (int64 strip = 0; strip < strips; strip++) {
    if (!Rows::kResident) strips_r[Rows::held(strip)].load(dout_row_g, y_row_g, strip, length);
    strips_r[Rows::held(strip)].store_dx(dx_row_g, strip, length, row_dot);
  }
}
