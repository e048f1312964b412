// dw = x^T dz on tensor cores, the gradient of linear's weight: float16 in and out, float32 accumulation, for many rows.
// dz is formed of dout and the preactivation on its way to shared memory (gradient_feed.cuh).
//
// Shapes    x (M, K), dout (M, N) and preactivation (M, N), rows contiguous; with PAIRED preactivation is (M, 2 N) and dw
//           (K, 2 N), gate and up. dw (K, N), rows contiguous; with TRANSPOSED its columns: then dw^T = dz^T x is what
//           is computed, and what is called rows here are columns of dw. addend, if given, is added before the rounding:
//           dw itself, to accumulate.
// Split     where the result has few tiles, 2^splits_log2 CTAs share each: each adds up a part of the rows of x. With
//           SPLIT they leave float32 sums (parts, rows, columns) in partials, which column_sums.cu adds in order.
// Tiles, grid, budget, barriers, edges: as in forward.cu. A k-tile has TILE_INNER rows of x.
#if !defined(ACTIVATION) || !defined(PAIRED) || !defined(TRANSPOSED) || !defined(SPLIT)
#error "ACTIVATION, PAIRED, TRANSPOSED and SPLIT come from a launch-configuration table"
#endif
#include "config.cuh"
#include "gradient_feed.cuh"

struct Traits {
  using Plain = Axis<false>;
  using Halves = Axis<PAIRED>;
  using Rows = Axis<PAIRED && TRANSPOSED>;
  using Columns = Axis<PAIRED && !TRANSPOSED>;
  static constexpr int kTogether = PAIRED ? 2 : 1;
  template <typename Tile>
  using FeedDz = GradientFeed<Chunks<Tile, Halves, Plain, CtaShape::kThreads, kTogether>, VEC, ACTIVATION, PAIRED>;
  template <typename Tile>
  using FeedX = ArrayFeed<Chunks<Tile, Plain, Plain, CtaShape::kThreads>, VEC>;
  using TileA = TileOfA<Lines::kAcross>;
  using TileB = TileOfB<Lines::kAcross>;
};

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_dw(const float16* x_g, const float16* dout_g, const float16* preactivation_g, const float16* addend_g,
              float* partials_g, float16* dw_g, const ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];

  // Phase 1: the place of this CTA, and its part of the sum.
  const Place cta = place_of_cta(params);
  const int first_row = cta.row_tile * (CtaShape::kTileRows / Traits::Rows::kHalves);
  const int first_column = cta.column_tile * (CtaShape::kTileColumns / Traits::Columns::kHalves);
  if (first_row >= params.rows) return;
  const int first_inner = SPLIT ? cta.split * params.split_inner : 0;
  const int inner = SPLIT ? min(params.split_inner, params.inner - first_inner) : params.inner;

  const auto store = [&](auto& product) {
    using Product = std::remove_reference_t<decltype(product)>;
  };
}
