// result = A B + addend on tensor cores: DTYPE in and out, float32 accumulation. The products of linear's backward:
// dx = dz w^T, dw = x^T dz, or dw^T = dz^T x if the columns of dw are contiguous.
//
// Shapes    A (rows, inner) and B (inner, columns), each with lines along the sum (A_LINES is kAlong: rows of A are
//           contiguous; B_LINES: columns of B) or across it. result (rows, columns), rows contiguous. addend, if given,
//           is added before the rounding: the result itself, to accumulate.
// Split     if the result has few tiles, several CTAs share a tile: each adds up a part of the sum and writes it in
//           float32 to partials (parts, rows, columns), which split_sums.cu adds in order (SPLIT).
// Tiles, grid, budget, barriers, edges: as in forward.cu.
#if !defined(DTYPE) || !defined(A_LINES) || !defined(B_LINES) || !defined(SPLIT)
#error "DTYPE, A_LINES, B_LINES and SPLIT come from a launch-configuration table"
#endif
#include "config.cuh"

struct Traits {
  using LoaderA = ArrayLoader<Chunks<TileOfA<Lines::A_LINES>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderB = ArrayLoader<Chunks<TileOfB<Lines::B_LINES>, Axis<false>, CtaShape::kThreads>, VEC>;
  using Product = ProductOf<DTYPE, LoaderA, LoaderB>;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_product(const DTYPE* a_g, const DTYPE* b_g, const DTYPE* addend_g, float* partials_g, DTYPE* result_g,
                   const ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];

  // Phase 1: the place of this CTA, and its part of the sum.
  const TileCoordinates cta = place_of_cta(params);
  const int first_row = cta.row_tile * CtaShape::kTileRows, first_column = cta.column_tile * CtaShape::kTileColumns;
  if (first_row >= params.rows) return;
  const int first_inner = SPLIT ? cta.split * params.split_inner : 0;
  if (SPLIT && first_inner >= params.inner) return;
  const int inner = SPLIT ? min(params.split_inner, params.inner - first_inner) : params.inner;

  // Phase 2: the product. The first k-tile is the ragged one.
  Traits::LoaderA a(a_g, params.a_stride, first_row, params.rows, first_inner);
  Traits::LoaderB b(b_g, params.b_stride, first_column, params.columns, first_inner);
  const int k_tiles = div_up(inner, CtaShape::kInner);
  Product product(a, b, shared_address(shared_bytes), k_tiles, inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  clear_sums(acc);
  product.add_to(acc);

  // Phase 3: store.
  const auto place = warp_place<Product, Axis<false>>(cta, params);
  if constexpr (SPLIT) {
    store_partials(partials_g + cta.split * (static_cast<int64>(params.rows) * params.columns), acc, place);
  } else {
    const MatrixOf<DTYPE> result = {result_g, params.out_stride};
    const MatrixOf<DTYPE> addend = {const_cast<DTYPE*>(addend_g), params.addend_stride};
    store_sums(result, addend, acc, place);
  }
}
