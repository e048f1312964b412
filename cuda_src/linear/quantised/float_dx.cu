// dx = dz w^T in float32 arithmetic with a quantised w, dz = dout * activation'(preactivation) computed as it is
// loaded.
//
// Shapes    as float32/dx.cu; w (K, W) in rows of codes that are its rows (W_ALONG: kDepth) or its columns (kLines).
// Work, budget, edges: as in float32/dx.cu and float_forward.cu.
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) || \
    !defined(FORMAT) || !defined(W_ALONG) || !defined(ACTIVATION) || !defined(GATED) || !defined(VEC) ||  \
    !defined(VEC_OUT) || !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, FORMAT, W_ALONG, ACTIVATION, GATED, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "float_operand.cuh"

using Scalar = DTYPE;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
using Dz = Operand<PreactivationGradient<Scalar, VEC, ACTIVATION, GATED>, Along::kDepth, false, TILE_M, THREADS>;
using W = Operand<QuantisedNumbers<FORMAT, Scalar>, Along::W_ALONG, false, TILE_N, THREADS>;
using Smem = QuantisedSmem<FORMAT, Dz, W>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_dx_quantised_f32(const Scalar* __restrict__ dout, const unsigned char* __restrict__ codes,
                            const FORMAT::Scale* __restrict__ scales, const float16* __restrict__ super_scales,
                            const Scalar* __restrict__ preactivation, Scalar* __restrict__ dx,
                            QuantisedFloatParams params) {
  __shared__ __align__(128) Smem smem;
  const FloatProductParams& shape = params.product;
  const TilePlace tile((shape.rows + TILE_M - 1) / TILE_M, (shape.columns + TILE_N - 1) / TILE_N);
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * TILE_N;
  const float* const codebook_s = smem.filled_codebook();

  float c[kThreadRows][kThreadColumns] = {};
  multiply<Tile>(c,
                 Dz{{dout, preactivation, shape.a_stride, shape.preactivation_stride, shape.half},
                    {first_row, shape.rows},
                    shape.depth},
                 W{{codes, scales, super_scales, codebook_s, shape.b_stride, params.blocks, params.block_log2},
                   {first_column, shape.columns},
                   shape.depth},
                 smem);
  store_gradient<VEC_OUT, Tile>(dx, c, shape, first_row, first_column);
}
