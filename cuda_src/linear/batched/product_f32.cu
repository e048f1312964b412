// out = a b for each member of a batch, in float32 arithmetic: every storage dtype.
//
// Shapes    a (rows, depth), b (depth, columns) and out (rows, columns) of each member (batch.cuh), rows of out
//           contiguous. If VEC is a whole vector, a and b are contiguous along the depth or along their lines (A_ALONG,
//           B_ALONG: kDepth or kLines). If VEC is 1 they may have any strides, and neighbouring threads take neighbours
//           along the smaller one.
// Work      a CTA computes TILE_M rows by TILE_N columns of one member, a thread 8 x 8 (float32/product.cuh). CTAs of a
//           member are neighbours.
// Budget    as float32/forward.cu.
// Edges     as float32/forward.cu.
#if !defined(DTYPE) || !defined(THREADS) || !defined(TILE_M) || !defined(TILE_N) || !defined(MIN_CTAS) || \
    !defined(A_ALONG) || !defined(B_ALONG) || !defined(VEC) || !defined(VEC_OUT) || !defined(SHARED_BYTES)
#error \
    "DTYPE, THREADS, TILE_M, TILE_N, MIN_CTAS, A_ALONG, B_ALONG, VEC, VEC_OUT and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../float32/product.cuh"
#include "batch.cuh"

// Field for field BATCHED_FLOAT_PARAMS of cupyattn/ops/linear/kernels_matmul.py.
struct BatchedFloatParams {
  FloatProductParams product;
  BatchParams batch;
  int64 a_item_stride, b_item_stride;  // from item to item of a line; 1 if VEC is a whole vector
};
static_assert(sizeof(BatchedFloatParams) == BATCHED_FLOAT_PARAMS_BYTES, "the NumPy twin is one layout");

using Scalar = DTYPE;
using Tile = ProductTile<TILE_M, TILE_N, THREADS>;
using Source = StridedNumbers<Scalar, VEC>;
using A = Operand<Source, Along::A_ALONG, false, TILE_M, THREADS>;
using B = Operand<Source, Along::B_ALONG, false, TILE_N, THREADS>;
using Smem = ProductSmem<A, B>;
static_assert(sizeof(Smem) == SHARED_BYTES, "the table allocates what the kernel uses");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    matmul_f32(const Scalar* __restrict__ a, const Scalar* __restrict__ b, Scalar* __restrict__ out,
               const BatchedFloatParams params) {
  __shared__ __align__(128) Smem smem;
  const FloatProductParams& shape = params.product;
  const uint32 member = params.batch.member();
  const Member at = params.batch.place(member);
  const TilePlace tile((shape.rows + TILE_M - 1) / TILE_M, (shape.columns + TILE_N - 1) / TILE_N,
                       params.batch.cta_of(member));
  const int64 first_row = tile.row * TILE_M, first_column = tile.column * TILE_N;

  float c[kThreadRows][kThreadColumns] = {};
  multiply<Tile>(c, A{{a + at.a, shape.a_stride, params.a_item_stride}, {first_row, shape.rows}, shape.depth},
                 B{{b + at.b, shape.b_stride, params.b_item_stride}, {first_column, shape.columns}, shape.depth}, smem);
  store_gradient<VEC_OUT, Tile>(out + at.out, c, shape, first_row, first_column);
}
