// out = activation(x w + b) + residual on tensor cores with a quantised w: DTYPE in and out, float32 accumulation,
// for many rows.
//
// Shapes    x (M, K), rows contiguous; w (K, N) as codes (N, K) with blocks of k (formats.cuh); with PAIRED, N is 2 n,
//           the columns of a gate, then those of up. All other arrays as in tensor_core/forward.cu.
// Tiles, grid, barriers, epilogue: as in tensor_core/forward.cu. Only the loader of w differs: a thread fetches the
//           codes and the scale of 16 weights of a column, and stores them as DTYPE (tile_loader.cuh).
// Budget    as in tensor_core/forward.cu; 3 to 5 registers of w are in flight, and 16 weights take 45 to 85
//           instructions a k-tile.
// Edges     as in tensor_core/forward.cu; K is a multiple of TILE_INNER.
#if !defined(DTYPE) || !defined(FORMAT) || !defined(ACTIVATION) || !defined(PAIRED)
#error "DTYPE, FORMAT, ACTIVATION and PAIRED come from a launch-configuration table"
#endif
#include "../tensor_core/forward_tile.cuh"
#include "tile_loader.cuh"

struct Traits {
  using Columns = Axis<PAIRED>;
  using Activation = ACTIVATION;
  using LoaderX = ArrayLoader<Chunks<TileOfA<Lines::kAlong>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderW = QuantisedLoader<FORMAT, TileOfB<Lines::kAlong>, Columns, CtaShape::kThreads, DTYPE>;
  using Product = ProductOf<DTYPE, LoaderX, LoaderW>;
  static constexpr int kOutTiles = Product::kNTiles / Columns::kHalves;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_forward_quantised(const DTYPE* x_g, const unsigned char* codes_g, const FORMAT::Scale* scales_g,
                             const float16* super_scales_g, const DTYPE* b_g, const DTYPE* residual_g,
                             DTYPE* preactivation_g, DTYPE* out_g, const QuantisedTileParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  using Columns = Traits::Columns;
  const ProductParams& shape = params.product;

  // Phase 1: the place of this CTA.
  const TileCoordinates cta = place_of_cta(shape);
  const int first_row = cta.row_tile * CtaShape::kTileRows;
  const int first_column = cta.column_tile * (CtaShape::kTileColumns / Columns::kHalves);
  if (first_row >= shape.rows) return;

  // Phase 2: the product.
  Traits::LoaderX x(x_g, shape.a_stride, first_row, shape.rows, 0);
  Traits::LoaderW w({codes_g, scales_g, super_scales_g}, params, first_column, shape.columns, 0);
  Product product(x, w, shared_address(shared_bytes), shape.inner / CtaShape::kInner, CtaShape::kInner);
  Product::Accumulators acc;
  const auto sums = warp_place<Product, Columns>(cta, shape);
  start_from_bias<Columns>(acc, b_g, sums.first_place, shape.columns);
  product.add_to(acc);

  // Phase 3: activation, residual, store.
  store_activated<Traits>(acc, sums, shape, ForwardArrays<DTYPE>{residual_g, preactivation_g, out_g});
}
