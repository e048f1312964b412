// dx = dz w^T in float32 arithmetic, dz = dout * activation'(preactivation) computed as it is loaded.
//
// Shapes    dout (M, N), preactivation (M, W) and dx (M, K), rows contiguous; w (K, W), contiguous along either axis
//           (W_ALONG: kDepth for rows of w, kLines for its columns). W = N, or 2 N if GATED.
// Work      a CTA computes TILE_M rows by TILE_N columns of dx, a thread 8 x 8 (product.cuh).
// Budget    as forward.cu; registers: up to 12 more for the next step, which loads three arrays instead of one.
// Edges     as forward.cu.
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) || \
    !defined(W_ALONG) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) || !defined(VEC_OUT) || \
    !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, W_ALONG, ACTIVATION, GATED, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "product.cuh"

using Scalar = DTYPE;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
using Dz = Operand<PreactivationGradient<Scalar, VEC, ACTIVATION, GATED>, Along::kDepth, false, TILE_M, THREADS>;
using W = Operand<Numbers<Scalar, VEC>, Along::W_ALONG, false, TILE_N, THREADS>;
using Smem = ProductSmem<Dz, W>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_dx_f32(const Scalar* __restrict__ dout, const Scalar* __restrict__ w,
                  const Scalar* __restrict__ preactivation, Scalar* __restrict__ dx, FloatProductParams params) {
  __shared__ __align__(128) Smem smem;
  const TilePlace tile((params.rows + TILE_M - 1) / TILE_M, (params.columns + TILE_N - 1) / TILE_N);
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * TILE_N;

  float c[kThreadRows][kThreadColumns] = {};
  multiply<Tile>(c,
                 Dz{{dout, preactivation, params.a_stride, params.preactivation_stride, params.half},
                    {first_row, params.rows},
                    params.depth},
                 W{{w, params.b_stride}, {first_column, params.columns}, params.depth}, smem);
  store_gradient<VEC_OUT, Tile>(dx, c, params, first_row, first_column);
}
