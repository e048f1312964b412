// out = activation(x w + b) + residual in float32 arithmetic with a quantised w.
//
// Shapes    as float32/forward.cu; w (K, W) in rows of codes that are its columns (W_ALONG: kDepth) or its rows
//           (kLines), formats.cuh.
// Work, budget, edges: as in float32/forward.cu. Codes are decoded to float32 before they are stored to shared memory
// (float_operand.cuh).
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) || \
    !defined(FORMAT) || !defined(W_ALONG) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) ||  \
    !defined(VEC_OUT) || !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, FORMAT, W_ALONG, ACTIVATION, GATED, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../float32/forward_tile.cuh"
#include "float_operand.cuh"

using Scalar = DTYPE;
constexpr bool kGated = GATED;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
using X = Operand<Numbers<Scalar, VEC>, Along::kDepth, false, TILE_M, THREADS>;
using W = Operand<QuantisedNumbers<FORMAT, Scalar>, Along::W_ALONG, kGated, TILE_N, THREADS>;
using Smem = QuantisedSmem<FORMAT, X, W>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_forward_quantised_f32(const Scalar* __restrict__ x, const unsigned char* __restrict__ codes,
                                 const FORMAT::Scale* __restrict__ scales, const float16* __restrict__ super_scales,
                                 const Scalar* __restrict__ b, const Scalar* __restrict__ residual,
                                 Scalar* __restrict__ out, Scalar* __restrict__ preactivation,
                                 QuantisedFloatParams params) {
  __shared__ __align__(128) Smem smem;
  const FloatProductParams& shape = params.product;
  constexpr int kTileColumns = kGated ? TILE_N / 2 : TILE_N;  // of the result
  const TilePlace tile((shape.rows + TILE_M - 1) / TILE_M, (shape.columns + kTileColumns - 1) / kTileColumns);
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * kTileColumns;
  const float* const codebook_s = smem.filled_codebook();

  float z[kThreadRows][kThreadColumns] = {};
  multiply<Tile>(z, X{{x, shape.a_stride}, {first_row, shape.rows}, shape.depth},
                 W{{codes, scales, super_scales, codebook_s, shape.b_stride, params.blocks, params.block_log2},
                   {first_column, shape.columns},
                   shape.depth},
                 smem);
  store_activated<Tile, ACTIVATION, kGated, VEC_OUT>(z, ForwardArrays<Scalar>{b, residual, out, preactivation}, shape,
                                                     first_row, first_column);
}
