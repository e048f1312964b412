// result = A B + addend on tensor cores with a quantised B: DTYPE in and out, float32 accumulation.
//
// Shapes    A (rows, inner), rows contiguous. B (inner, columns) as codes in rows that lie along the sum (B_LINES is
//           kAlong: B is w, codes (columns, inner)) or across it (kAcross: dx = dz w^T, codes (inner, columns)).
// Split, tiles, grid, barriers: as in tensor_core/product.cu. The loader of B is tile_loader.cuh.
// Edges     as in tensor_core/product.cu; the codes' row, which is inner or columns, is a multiple of 32 items.
#if !defined(DTYPE) || !defined(FORMAT) || !defined(B_LINES) || !defined(SPLIT)
#error "DTYPE, FORMAT, B_LINES and SPLIT come from a launch-configuration table"
#endif
#include "../tensor_core/config.cuh"
#include "tile_loader.cuh"

struct Traits {
  using LoaderA = ArrayLoader<Chunks<TileOfA<Lines::kAlong>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderB = QuantisedLoader<FORMAT, TileOfB<Lines::B_LINES>, Axis<false>, CtaShape::kThreads, DTYPE>;
  using Product = ProductOf<DTYPE, LoaderA, LoaderB>;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_product_quantised(const DTYPE* a_g, const unsigned char* codes_g, const FORMAT::Scale* scales_g,
                             const float16* super_scales_g, const DTYPE* addend_g, float* partials_g, DTYPE* result_g,
                             const QuantisedTileParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const ProductParams& shape = params.product;

  // Phase 1: the place of this CTA, and its part of the sum.
  const TileCoordinates cta = place_of_cta(shape);
  const int first_row = cta.row_tile * CtaShape::kTileRows, first_column = cta.column_tile * CtaShape::kTileColumns;
  if (first_row >= shape.rows) return;
  const int first_inner = SPLIT ? cta.split * shape.split_inner : 0;
  if (SPLIT && first_inner >= shape.inner) return;
  const int inner = SPLIT ? min(shape.split_inner, shape.inner - first_inner) : shape.inner;

  // Phase 2: the product. The first k-tile is the ragged one.
  Traits::LoaderA a(a_g, shape.a_stride, first_row, shape.rows, first_inner);
  Traits::LoaderB b({codes_g, scales_g, super_scales_g}, params, first_column, shape.columns, first_inner);
  const int k_tiles = div_up(inner, CtaShape::kInner);
  Product product(a, b, shared_address(shared_bytes), k_tiles, inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  clear_sums(acc);
  product.add_to(acc);

  // Phase 3: store.
  const auto place = warp_place<Product, Axis<false>>(cta, shape);
  if constexpr (SPLIT) {
    store_partials(partials_g + cta.split * (static_cast<int64>(shape.rows) * shape.columns), acc, place);
  } else {
    const MatrixOf<DTYPE> result = {result_g, shape.out_stride};
    const MatrixOf<DTYPE> addend = {const_cast<DTYPE*>(addend_g), shape.addend_stride};
    store_sums(result, addend, acc, place);
  }
}
