// dw = x^T dz in float32 arithmetic, dz = dout * activation'(preactivation) computed as it is loaded.
//
// Shapes    x (M, K), dout (M, N) and preactivation (M, W), rows contiguous; dw (K, W). W = N, or 2 N if GATED.
//           TRANSPOSED computes dw^T = dz^T x, for a dw whose columns are contiguous.
// Work      a CTA computes TILE_M rows by TILE_N columns, a thread 8 x 8 (product.cuh), over all M: the result is
//           reproducible bit by bit.
// Budget    as dx.cu.
// Edges     as forward.cu.
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) ||    \
    !defined(TRANSPOSED) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) || !defined(VEC_OUT) || \
    !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, TRANSPOSED, ACTIVATION, GATED, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "product.cuh"

using Scalar = DTYPE;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
template <int kLines>
using X = Operand<Numbers<Scalar, VEC>, Along::kLines, false, kLines, THREADS>;
template <int kLines>
using Dz = Operand<PreactivationGradient<Scalar, VEC, ACTIVATION, GATED>, Along::kLines, false, kLines, THREADS>;
using Smem = ProductSmem<X<TILE_M>, X<TILE_N>>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_dw_f32(const Scalar* __restrict__ x, const Scalar* __restrict__ dout,
                  const Scalar* __restrict__ preactivation, Scalar* __restrict__ dw, FloatProductParams params) {
  __shared__ __align__(128) float buffers[sizeof(Smem) / sizeof(float)];
  const TilePlace tile((params.rows + TILE_M - 1) / TILE_M, (params.columns + TILE_N - 1) / TILE_N);
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * TILE_N;
  const Lines<false> rows{first_row, params.rows}, columns{first_column, params.columns};
  const PreactivationGradient<Scalar, VEC, ACTIVATION, GATED> dz{dout, preactivation, params.b_stride,
                                                                 params.preactivation_stride, params.half};

  float c[kThreadRows][kThreadColumns] = {};
  if constexpr (TRANSPOSED) {
    using Pair = ProductSmem<Dz<TILE_M>, X<TILE_N>>;
    multiply<Tile>(c, Dz<TILE_M>{dz, rows, params.depth}, X<TILE_N>{{x, params.a_stride}, columns, params.depth},
                   *reinterpret_cast<Pair*>(buffers));
  } else {
    using Pair = ProductSmem<X<TILE_M>, Dz<TILE_N>>;
    multiply<Tile>(c, X<TILE_M>{{x, params.a_stride}, rows, params.depth}, Dz<TILE_N>{dz, columns, params.depth},
                   *reinterpret_cast<Pair*>(buffers));
  }
  store_gradient<VEC_OUT, Tile>(dw, c, params, first_row, first_column);
}
