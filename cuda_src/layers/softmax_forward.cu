// Softmax over the last axis, forward.
//
//   y_i = exp(x_i - m) / l,   m = max_j x_j,   l = sum_j exp(x_j - m)
//
// Each thread runs the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3) over its part of the row,
// and the threads' m and l are merged. RESIDENT rows stay in registers in between; longer ones are read twice.
//
// Shapes    x and y of any rank and any outer strides, last axis contiguous (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats of the row (VEC where it is not RESIDENT); shared memory: one float per
//           warp.
// Edges     a row whose every entry is -inf gives zeros (as an attention row without keys); NaN fills its row.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || !defined(RESIDENT)
#error "DTYPE, THREADS, LANES, STRIPS, VEC and RESIDENT come from a launch-configuration table"
#endif
#include "../common/online_softmax.cuh"
#include "../common/rows.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<2>;
using RowSoftmax = OnlineSoftmax<Unit::kNatural>;
enum Array { kX, kY };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "cupyattn/kernels/structs.py describes another struct");

// From the maximum and sum of each thread's part of the row to those of the whole row.
__device__ __forceinline__ void merge_row(RowSoftmax& softmax, float* partial_s) {
  softmax.raise(row_reduce<Max, Rows>(softmax.m, partial_s));
  softmax.l = row_reduce<Sum, Rows>(softmax.l, partial_s);
}

__device__ __forceinline__ void fold(RowSoftmax& softmax, const float (&x)[Rows::kVec]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < Rows::kVec; i++) largest = fmaxf(largest, x[i]);
  softmax.raise(largest);
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) softmax.l += softmax.weight(x[i]);
}

__device__ __forceinline__ void store_weights(Scalar* y_row_g, const float (&x)[Rows::kVec], int64 strip, int64 length,
                                              const RowSoftmax& softmax) {
  float y[Rows::kVec];
#pragma unroll
  for (int i = 0; i < Rows::kVec; i++) y[i] = softmax.weight(x[i]) * softmax.normaliser();
  store_strip<Rows>(y_row_g, y, strip, length);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_forward(const Scalar* x_g, Scalar* y_g, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 row = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = row < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Scalar* x_row_g = x_g + row_offset(params, kX, exists ? row : 0);
  Scalar* y_row_g = y_g + row_offset(params, kY, exists ? row : 0);
  const int64 length = exists ? params.length : 0;

  // Phase 1: maximum and sum, in one read.
  const int64 strips = Rows::strips(length);
  float x[Rows::kHeldStrips][Rows::kVec];
  RowSoftmax softmax;
#pragma unroll Rows::kHeldStrips
  for (int64 strip = 0; strip < strips; strip++) {
    load_strip<Rows>(x[Rows::held(strip)], x_row_g, strip, length, -kInfinity);
    fold(softmax, x[Rows::held(strip)]);
  }
  merge_row(softmax, partial_s);

  // Phase 2: the weights, from the registers or a second read.
#pragma unroll Rows::kHeldStrips
  for (int64 strip = 0; strip < strips; strip++) {
    if (!Rows::kResident) load_strip<Rows>(x[Rows::held(strip)], x_row_g, strip, length, -kInfinity);
    store_weights(y_row_g, x[Rows::held(strip)], strip, length, softmax);
  }
}
