// The epilogue of a skinny product whose K is split over CTAs: the splits added in their order, bias, activation,
// residual.
//
//   z = sum_s partials[s] + b,   out = act(z) + residual (tile.cuh)
//
// Shapes    partials (splits, M, W) float32, written by product.cu or row.cu; the other arrays of DTYPE, as in
//           tile.cuh.
// Work      A thread finishes one item of out; neighbours own neighbouring columns. Grid: ceil(M N / THREADS).
// Budget    no shared memory. A second launch costs time: K is split only if there are few CTAs.
// Edges     M N need not be a multiple of THREADS.
#if !defined(DTYPE) || !defined(ACTIVATION) || !defined(GATED) || !defined(THREADS)
#error "DTYPE, ACTIVATION, GATED and THREADS come from a launch-configuration table"
#endif
#include "tile.cuh"

static_assert(sizeof(ThinParams) == THIN_PARAMS_BYTES, "its dtype in Python describes another struct");

__device__ __forceinline__ float total(const float* partials_g, int64 part, int splits, float bias) {
#pragma unroll 4
  for (int split = 0; split < splits; split++) bias += partials_g[split * part];
  return bias;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_thin_merge(const float* partials_g, const DTYPE* b_g, const DTYPE* residual_g, DTYPE* preactivation_g,
                      DTYPE* out_g, const ThinParams params) {
  const int64 item = blockIdx.x * static_cast<int64>(THREADS) + threadIdx.x;
  const int row = static_cast<int>(item / params.outer), column = static_cast<int>(item % params.outer);
  if (row >= params.rows) return;
  const int64 columns = static_cast<int64>(params.outer) * (GATED ? 2 : 1), part = params.rows * columns;
  const int64 up_column = static_cast<int64>(params.outer) + column;
  const float* row_g = partials_g + row * columns;

  const float z = total(row_g + column, part, params.splits, b_g ? to_float(b_g[column]) : 0.f);
  float up = 0.f;
  if (GATED) up = total(row_g + up_column, part, params.splits, b_g ? to_float(b_g[up_column]) : 0.f);
  const Epilogue<ACTIVATION, GATED, DTYPE, DTYPE> finish = {residual_g, preactivation_g, out_g};
  finish.store(params, row, column, z, up);
}
