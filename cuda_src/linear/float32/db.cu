// Partial sums of dz = dout * activation'(preactivation) over rows, whose sum is the gradient of a bias.
//
// Shapes    dout (M, N), preactivation (M, W), rows contiguous; partials (parts, W) float32. W = N, or 2 N if GATED.
// Work      a CTA takes `part_rows` neighbouring rows and THREADS * items columns, a thread 16 bytes' worth of columns;
//           neighbouring CTAs take neighbouring columns. column_sums.cu adds the parts, in a fixed order.
// Budget    registers: a sum for each column of a thread; no shared memory.
// Edges     columns beyond W are not read; VEC is 1 unless rows are whole aligned vectors.
#if !defined(DTYPE) || !defined(THREADS) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC)
#error "DTYPE, THREADS, ACTIVATION, GATED and VEC come from a launch-configuration table"
#endif
#include "product.cuh"

using Scalar = DTYPE;
using Dz = PreactivationGradient<Scalar, VEC, ACTIVATION, GATED>;

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_db_f32(const Scalar* __restrict__ dout, const Scalar* __restrict__ preactivation,
                  float* __restrict__ partials, FloatProductParams params) {
  constexpr int64 kColumns = int64{THREADS} * Dz::kItems;
  const int64 column_tiles = (params.columns + kColumns - 1) / kColumns;
  const int64 part = blockIdx.x / column_tiles;
  const int64 column = blockIdx.x % column_tiles * kColumns + threadIdx.x * Dz::kItems;
  const Dz dz{dout, preactivation, params.b_stride, params.preactivation_stride, params.half};
  const int64 first = part * params.depth, end = min(first + params.depth, params.rows);

  float sums[Dz::kItems] = {};
#pragma unroll 4
  for (int64 row = first; row < end; row++) {
    typename Dz::Fetched fetched;
    float values[Dz::kItems];
    dz.fetch(fetched, row, column, params.columns - column);
    dz.finish(values, fetched, column);
#pragma unroll
    for (int i = 0; i < Dz::kItems; i++) sums[i] += values[i];
  }
  float* const target_g = partials + part * params.columns + column;
  if constexpr (VEC > 1) {
    if (column < params.columns) store_vec(target_g, sums);
  } else {
#pragma unroll
    for (int i = 0; i < Dz::kItems; i++) {
      if (column + i < params.columns) target_g[i] = sums[i];
    }
  }
}
