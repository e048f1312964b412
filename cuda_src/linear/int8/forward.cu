// out = activation(x w + b) + residual on tensor cores with x and w in int8: int32 sums, float32 epilogue.
//
//   z[m, n] = (sum_k xq[m, k] wq[n, k]) sx[m] sw[n] + b[n],   out = activation(z) + residual
//
// Shapes    x codes (M, K) and w codes (N, K), rows contiguous and of whole 16 bytes, with scales (M,) and (N,);
//           params.inner counts pairs of codes, K / 2. With PAIRED, N is 2 n, the columns of a gate, then those of up,
//           and out = activation(z_gate) * z_up + residual. preactivation, if given, is z. DTYPE is that of b,
//           residual, preactivation and out.
// Tiles, grid, barriers: as in tensor_core/forward.cu. A pair of neighbouring codes is one 16-bit item of the tile
//           product, so loaders, swizzle and fragments are those of float16, and TILE_INNER counts pairs.
// Budget    as in tensor_core/forward.cu. The epilogue handles 4 or 2 tiles of columns for all rows of a warp, then the
//           next: their scales and bias take up to 16 registers, and the sums that are stored free as many.
// Edges     as in tensor_core/forward.cu. K is a multiple of 32. Sums are exact for K up to 133,000; beyond 2^24 their
//           conversion rounds. A scale that is NaN gives a row or a column of NaN.
#if !defined(DTYPE) || !defined(ACTIVATION) || !defined(PAIRED)
#error "DTYPE, ACTIVATION and PAIRED come from a launch-configuration table"
#endif
#include "../../common/activations.cuh"
#include "../tensor_core/config.cuh"

struct Traits {
  using Columns = Axis<PAIRED>;
  using Activation = ACTIVATION;
  using LoaderX = ArrayLoader<Chunks<TileOfA<Lines::kAlong>, Axis<false>, CtaShape::kThreads>, VEC>;
  using LoaderW = ArrayLoader<Chunks<TileOfB<Lines::kAlong>, Columns, CtaShape::kThreads>, VEC>;
  using Product = IntegerProductOf<LoaderX, LoaderW>;
  static constexpr int kHalves = Columns::kHalves;
  static constexpr int kOutTiles = Product::kNTiles / kHalves;  // a warp's tiles of columns of the result
};

using Product = Traits::Product;
static_assert(STAGES * Product::kStageBytes == SHARED_BYTES, "the table counts other shared memory");

struct Arrays {
  const float *x_scales_g, *w_scales_g;
  const DTYPE *b_g, *residual_g;
  DTYPE *preactivation_g, *out_g;
};

// Scales and bias of kTiles neighbouring tiles of columns of sums: a lane has two columns of each.
template <int kTiles>
struct ColumnNumbers {
  float scale[kTiles][2], bias[kTiles][2];

  __device__ __forceinline__ ColumnNumbers(const Arrays& arrays, int first_place, int columns) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int place = first_place + 8 * n + lane_index() % 4 * 2 + e;
        const int column = Traits::Columns::half(place) * columns + min(Traits::Columns::item(place), columns - 1);
        scale[n][e] = arrays.w_scales_g[column];
        bias[n][e] = arrays.b_g != nullptr ? to_float(arrays.b_g[column]) : 0.f;
      }
    }
  }
};

// Tiles of columns of the result that are stored together. 16-bit items are exchanged within a quad of lanes, four
// tiles for 16 bytes. Two fill sectors as well, and leave registers for two halves, where four would spill.
constexpr int kMostTiles = PAIRED ? 2 : 4;

// The results of all rows of a warp, from tile kFirst of its columns on: kMostTiles, or the last 2, then the others.
template <int kFirst, typename Coordinates>
__device__ __forceinline__ void store_columns(const Product::Accumulators& acc, const Coordinates& sums,
                                              const ProductParams& params, const Arrays& arrays) {
  if constexpr (kFirst < Traits::kOutTiles) {
    constexpr int kTiles = Traits::kOutTiles - kFirst >= kMostTiles ? kMostTiles : 2;
    constexpr int kSumTiles = kTiles * Traits::kHalves;
    constexpr int kFirstSum = kFirst * Traits::kHalves;
    const WarpCoordinates<Axis<false>> results = {sums.first_row, Traits::Columns::item(sums.first_place), params.rows,
                                                  params.columns};
    const MatrixOf<DTYPE> out = {arrays.out_g, params.out_stride}, none = {nullptr, 0};
    const MatrixOf<DTYPE> preactivation = {arrays.preactivation_g, params.preactivation_stride};
    const MatrixOf<DTYPE> residual = {const_cast<DTYPE*>(arrays.residual_g), params.addend_stride};
    const ColumnNumbers<kSumTiles> numbers(arrays, sums.first_place + 8 * kFirstSum, params.columns);
#pragma unroll
    for (int m = 0; m < Product::kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = sums.row(m, half);
        const float row_scale = arrays.x_scales_g[min(row, params.rows - 1)];
        const auto z = [&](int n, int e) {
          const float sum = static_cast<float>(acc[m][kFirstSum + n][2 * half + e]);
          return __fmaf_rn(__fmul_rn(sum, row_scale), numbers.scale[n][e], numbers.bias[n][e]);
        };
        float values[kTiles][2];
        if (arrays.preactivation_g != nullptr) {
#pragma unroll
          for (int first = 0; first < kSumTiles; first += kTiles) {
#pragma unroll
            for (int n = 0; n < kTiles; n++) values[n][0] = z(first + n, 0), values[n][1] = z(first + n, 1);
            write_columns<kTiles>(preactivation, none, values, sums, row, sums.first_place + 8 * (kFirstSum + first));
          }
        }
#pragma unroll
        for (int n = 0; n < kTiles; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            values[n][e] = Traits::Activation::value(z(n * Traits::kHalves, e));
            if constexpr (PAIRED) values[n][e] *= z(2 * n + 1, e);
          }
        }
        write_columns<kTiles>(out, residual, values, results, row, results.first_place + 8 * kFirst);
      }
    }
    store_columns<kFirst + kTiles>(acc, sums, params, arrays);
  }
}

extern "C" __global__ void __launch_bounds__(CtaShape::kThreads, MIN_CTAS)
    linear_forward_int8(const signed char* x_g, const float* x_scales_g, const signed char* w_g,
                        const float* w_scales_g, const DTYPE* b_g, const DTYPE* residual_g, DTYPE* preactivation_g,
                        DTYPE* out_g, const ProductParams params) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];

  // Phase 1: the place of this CTA.
  const TileCoordinates cta = place_of_cta(params);
  const int first_row = cta.row_tile * CtaShape::kTileRows;
  const int first_column = cta.column_tile * (CtaShape::kTileColumns / Traits::kHalves);
  if (first_row >= params.rows) return;

  // Phase 2: the product of pairs. The first k-tile is the ragged one.
  Traits::LoaderX x(reinterpret_cast<const float16*>(x_g), params.a_stride, first_row, params.rows, 0);
  Traits::LoaderW w(reinterpret_cast<const float16*>(w_g), params.b_stride, first_column, params.columns, 0);
  const int k_tiles = div_up(params.inner, CtaShape::kInner);
  Product product(x, w, shared_address(shared_bytes), k_tiles, params.inner - (k_tiles - 1) * CtaShape::kInner);
  Product::Accumulators acc;
  clear_sums(acc);
  product.add_to(acc);

  // Phase 3: scales, bias, activation, residual, store.
  store_columns<0>(acc, warp_place<Product, Traits::Columns>(cta, params), params,
                   {x_scales_g, w_scales_g, b_g, residual_g, preactivation_g, out_g});
}
