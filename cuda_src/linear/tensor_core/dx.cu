// dx = dz w^T on tensor cores, the gradient of linear's input: float16 in and out, float32 accumulation, for many rows.
// dz is formed of dout and the preactivation on its way to shared memory (gradient_feed.cuh).
//
// Shapes    dout (M, N) and preactivation (M, N), rows contiguous; w (K, N), rows contiguous (W_LINES is kAlong, along
//           the sum) or columns; with PAIRED preactivation is (M, 2 N) and w (K, 2 N), gate and up. dx (M, K). addend, if
//           given, is added before the rounding: dx itself, to accumulate.
// Tiles, grid, budget, barriers, edges: as in forward.cu. A k-tile has TILE_INNER columns of dz.
#if !defined(W_LINES) || !defined(ACTIVATION) || !defined(PAIRED)
#error "W_LINES, ACTIVATION and PAIRED come from a launch-configuration table"
#endif
#include "config.cuh"
#include "gradient_feed.cuh"

struct Traits {
  using Plain = Axis<false>;
  using Sum = Axis<PAIRED>;
  static constexpr int kTogether = PAIRED ? 2 : 1;
  using FeedDz =
      GradientFeed<Chunks<TileOfA<Lines::kAlong>, Plain, Sum, CtaShape::kThreads, kTogether>, VEC, ACTIVATION, PAIRED>;
  using FeedW = ArrayFeed<Chunks<TileOfB<Lines::W_LINES>, Plain, Sum, CtaShape::kThreads>, VEC>;
  using Product = TileProduct<FeedDz, FeedW, WARP_ROWS, WARP_COLUMNS>;
};

using Product = Traits::Product;
static_assert(2 * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_dx(const float16* dout_g, const float16* preactivation_g, const float16* w_g, const float16* addend_g,
              float16* dx_g, const ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];

  // Phase 1: the place of this CTA.
  const Place cta = place_of_cta(params);
  const int first_row = cta.row_tile * CtaShape::kTileRows, first_column = cta.column_tile * CtaShape::kTileColumns;
  if (first_row >= params.rows) return;

  // Phase 2: the product. The first k-tile is the ragged one.
  Traits::FeedDz dz(dout_g, preactivation_g, params.a_stride, params.preactivation_stride, first_row, params.rows, 0,
                    params.inner);
  Traits::FeedW w(w_g, params.b_stride, first_column, params.columns, 0, params.inner);
  const int k_tiles = div_up(params.inner, Product::kItems);
  Product product(dz, w, shared_address(shared_bytes), k_tiles, params.inner - (k_tiles - 1) * Product::kItems);
  Product::Accumulators acc;
  clear(acc);
  product.add_to(acc);

  // Phase 3: store.
  const auto place = product_place<Product, Traits::Plain, Traits::Plain>(params, cta);
  store_sums<Product>({dx_g, params.out_stride}, {const_cast<float16*>(addend_g), params.addend_stride}, acc, place);
}
