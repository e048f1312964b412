// out = activation(x w + b) + residual on tensor cores: DTYPE in and out, float32 accumulation, for many rows.
//
// Shapes    x (M, K), rows contiguous; w (K, N), rows contiguous or, if W_LINES is kAlong, columns (the transpose of
//           an (N, K) array); with PAIRED w is (K, 2 N), the columns of a gate, then those of up,
//           and out = activation(x w_gate + b_gate) * (x w_up + b_up) + residual. preactivation, if given, is x w + b.
// Tiles     TILE_ROWS x TILE_COLUMNS of the result a CTA (cooperative thread array: a block of threads), WARP_ROWS x
//           WARP_COLUMNS a warp, TILE_INNER items of the sum at a time. Turing's shared memory delivers half of what
//           its tensor cores could consume, so a warp's tile is as large as its registers allow: 64 x 96. With
//           NATIVE, from sm_80 on, it has that size because L2 is a limit too.
// Grid      one CTA for each tile, and a few without one (params.cuh): neighbours share operands in L2.
// Budget    shared memory: STAGES stages of both operands; registers: WARP_ROWS * WARP_COLUMNS / 32 accumulators,
//           fragments of one or two steps, A_RING + B_RING quads in flight. With NATIVE: fragments of A of one or two
//           steps and of three or four pairs of tiles of B, and an offset for each piece.
// Barriers  one per k-tile.
// Edges     rows and columns beyond the arrays are computed from existing ones and not stored; items of the sum beyond
//           K are zeros, in the first k-tile.
#if !defined(DTYPE) || !defined(W_LINES) || !defined(ACTIVATION) || !defined(PAIRED)
#error "DTYPE, W_LINES, ACTIVATION and PAIRED come from a launch-configuration table"
#endif
#include "forward_tile.cuh"

struct Traits {
  using Columns = Axis<PAIRED>;
  using Activation = ACTIVATION;
  using LoaderX = ArrayLoader<Chunks<TileOfA<Lines::kAlong>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderW = ArrayLoader<Chunks<TileOfB<Lines::W_LINES>, Columns, CtaShape::kThreads>, VEC>;
  using Product = ProductOf<DTYPE, LoaderX, LoaderW>;
  static constexpr int kOutTiles = Product::kNTiles / Columns::kHalves;
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_forward(const DTYPE* x_g, const DTYPE* w_g, const DTYPE* b_g, const DTYPE* residual_g,
                   DTYPE* preactivation_g, DTYPE* out_g, const ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  using Columns = Traits::Columns;

  // Phase 1: the place of this CTA.
  const TileCoordinates cta = place_of_cta(params);
  const int first_row = cta.row_tile * CtaShape::kTileRows;
  const int first_column = cta.column_tile * (CtaShape::kTileColumns / Columns::kHalves);
  if (first_row >= params.rows) return;

  // Phase 2: the product. The first k-tile is the ragged one.
  Traits::LoaderX x(x_g, params.a_stride, first_row, params.rows, 0);
  Traits::LoaderW w(w_g, params.b_stride, first_column, params.columns, 0);
  const int k_tiles = div_up(params.inner, CtaShape::kInner);
  Product product(x, w, shared_address(shared_bytes), k_tiles, params.inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  const auto sums = warp_place<Product, Columns>(cta, params);
  start_from_bias<Columns>(acc, b_g, sums.first_place, params.columns);
  product.add_to(acc);

  // Phase 3: activation, residual, store.
  store_activated<Traits>(acc, sums, params, ForwardArrays<DTYPE>{residual_g, preactivation_g, out_g});
}
