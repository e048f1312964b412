// out = activation(x w + b) + residual in float32 arithmetic.
//
// Shapes    x (M, K), rows contiguous; w (K, W), contiguous along either axis (W_ALONG: kLines for rows of w, kDepth
//           for its columns); b (W); residual and out (M, N); preactivation (M, W). W = N, or 2 N if GATED: then
//           columns n and N + n are a gate and the column of up that it multiplies.
// Work      a CTA computes TILE_M rows by TILE_N columns of x w, a thread 8 x 8 (product.cuh).
// Budget    shared memory: two steps of both factors, 2 * depth * (TILE_M + TILE_N) floats, depth 8 of float32 and 16
//           of narrower items; registers: 64 sums, 32 factors in use and in flight, 8 of the next step.
// Edges     rows, columns and depths beyond the arrays are zeros that are never read; results there are not stored.
//           VEC is 1 unless lines of the factors are whole aligned vectors; VEC_OUT is 1 unless those of all
//           other arrays are.
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) || \
    !defined(W_ALONG) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) || !defined(VEC_OUT) || \
    !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, W_ALONG, ACTIVATION, GATED, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "forward_tile.cuh"

using Scalar = DTYPE;
using Act = ACTIVATION;
constexpr bool kGated = GATED;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
using X = Operand<Numbers<Scalar, VEC>, Along::kDepth, false, TILE_M, THREADS>;
using W = Operand<Numbers<Scalar, VEC>, Along::W_ALONG, kGated, TILE_N, THREADS>;
using Smem = ProductSmem<X, W>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_forward_f32(const Scalar* __restrict__ x, const Scalar* __restrict__ w, const Scalar* __restrict__ b,
                       const Scalar* __restrict__ residual, Scalar* __restrict__ out,
                       Scalar* __restrict__ preactivation, FloatProductParams params) {
  __shared__ __align__(128) Smem smem;
  constexpr int kTileColumns = kGated ? TILE_N / 2 : TILE_N;  // of the result
  const TilePlace tile((params.rows + TILE_M - 1) / TILE_M, (params.columns + kTileColumns - 1) / kTileColumns);
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * kTileColumns;

  float z[kThreadRows][kThreadColumns] = {};
  multiply<Tile>(z, X{{x, params.a_stride}, {first_row, params.rows}, params.depth},
                 W{{w, params.b_stride}, {first_column, params.columns}, params.depth}, smem);

  store_activated<Tile, Act, kGated, VEC_OUT>(z, ForwardArrays<Scalar>{b, residual, out, preactivation}, params,
                                              first_row, first_column);
}
