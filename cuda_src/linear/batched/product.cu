// out = a b for each member of a batch, on tensor cores: DTYPE in and out, float32 accumulation.
//
// Shapes    a (rows, inner), b (inner, columns) and out (rows, columns) of each member (batch.cuh), rows of out
//           contiguous: the caller exchanges the operands for an out with contiguous columns. If VEC is 8, a has lines
//           along the sum (A_LINES is kAlong: its rows are contiguous) or across it, and so has b (kAlong: its columns
//           are contiguous). If VEC is 1, a and b may have any strides; lines follow the smaller stride.
// Grid      the CTAs of one product, as in tensor_core/forward.cu, for one member after the other.
// Tiles, budget, barriers, edges: as in tensor_core/forward.cu.
#if !defined(DTYPE) || !defined(A_LINES) || !defined(B_LINES)
#error "DTYPE, A_LINES and B_LINES come from a launch-configuration table"
#endif
#include "../tensor_core/config.cuh"
#include "batch.cuh"

// Field for field BATCHED_PRODUCT_PARAMS of cupyattn/ops/linear/kernels_matmul.py.
struct BatchedProductParams {
  ProductParams product;
  BatchParams batch;
  int64 a_item_stride, b_item_stride;  // from item to item of a line; 1 if VEC is 8
};
static_assert(sizeof(BatchedProductParams) == BATCHED_PRODUCT_PARAMS_BYTES, "the NumPy twin is one layout");

template <typename Chunks, int kVec>
struct OperandLoader : ArrayLoader<Chunks, kVec> {
  __device__ __forceinline__ OperandLoader(const DTYPE* array_g, int64 line_stride, int64, int first, int length)
      : ArrayLoader<Chunks, kVec>(array_g, line_stride, first, length, 0) {}
};
template <typename Chunks>
struct OperandLoader<Chunks, 1> : StridedLoader<Chunks> {
  using StridedLoader<Chunks>::StridedLoader;
};

struct Traits {
  using LoaderA = OperandLoader<Chunks<TileOfA<Lines::A_LINES>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderB = OperandLoader<Chunks<TileOfB<Lines::B_LINES>, Axis<false>, CtaShape::kThreads>, VEC>;
  using Product = ProductOf<DTYPE, LoaderA, LoaderB>;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    matmul(const DTYPE* a_g, const DTYPE* b_g, DTYPE* out_g, const BatchedProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const ProductParams& shape = params.product;

  // Phase 1: the member of the batch, and the place of this CTA.
  const uint32 member = params.batch.member();
  const TileCoordinates cta = place_of_cta(shape, params.batch.cta_of(member));
  const int first_row = cta.row_tile * CtaShape::kTileRows, first_column = cta.column_tile * CtaShape::kTileColumns;
  if (first_row >= shape.rows) return;
  const Member at = params.batch.place(member);

  // Phase 2: the product. The first k-tile is the ragged one.
  Traits::LoaderA a(a_g + at.a, shape.a_stride, params.a_item_stride, first_row, shape.rows);
  Traits::LoaderB b(b_g + at.b, shape.b_stride, params.b_item_stride, first_column, shape.columns);
  const int k_tiles = div_up(shape.inner, CtaShape::kInner);
  Product product(a, b, shared_address(shared_bytes), k_tiles, shape.inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  clear_sums(acc);
  product.add_to(acc);

  // Phase 3: store.
  const auto place = warp_place<Product, Axis<false>>(cta, shape);
  const MatrixOf<DTYPE> out = {out_g + at.out, shape.out_stride}, none = {nullptr, 0};
  store_sums(out, none, acc, place);
}
