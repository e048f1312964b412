// The prologue and the epilogue of the forwards: sums start from the bias; activation, residual, store.
#pragma once

#include "../../common/activations.cuh"
#include "config.cuh"

// Every row starts from the bias.
template <typename Columns, typename Scalar, int kMTiles, int kNTiles>
__device__ __forceinline__ void start_from_bias(float (&acc)[kMTiles][kNTiles][4], const Scalar* b_g, int first_place,
                                                int columns) {
#pragma unroll
  for (int n = 0; n < kNTiles; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int place = first_place + 8 * n + lane_index() % 4 * 2 + e;
      const int column = Columns::item(place);
      const bool given = b_g != nullptr && column < columns;
      const float bias = given ? to_float(b_g[Columns::half(place) * columns + column]) : 0.f;
#pragma unroll
      for (int m = 0; m < kMTiles; m++) acc[m][n][e] = acc[m][n][2 + e] = bias;
    }
  }
}

template <typename Scalar>
struct ForwardArrays {
  const Scalar* residual_g;
  Scalar* preactivation_g;
  Scalar* out_g;
};

// Traits has Columns, Activation and kOutTiles: a warp's tiles of columns of the result. A gate and its column of up
// are one column of the result.
template <typename Traits, typename Scalar, int kMTiles, int kNTiles, typename Coordinates>
__device__ __forceinline__ void store_activated(const float (&acc)[kMTiles][kNTiles][4], const Coordinates& sums,
                                                const ProductParams& params, const ForwardArrays<Scalar>& arrays) {
  using Columns = typename Traits::Columns;
  const WarpCoordinates<Axis<false>> results = {sums.first_row, Columns::item(sums.first_place), params.rows,
                                                params.columns};
  const MatrixOf<Scalar> out = {arrays.out_g, params.out_stride}, none = {nullptr, 0};
  const MatrixOf<Scalar> preactivation = {arrays.preactivation_g, params.preactivation_stride};
  const MatrixOf<Scalar> residual = {const_cast<Scalar*>(arrays.residual_g), params.addend_stride};
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = sums.row(m, half);
      if (arrays.preactivation_g != nullptr) {
        write_row<0, kNTiles>(preactivation, none, sums, row, SumsOfRow{acc[m], half});
      }
      write_row<0, Traits::kOutTiles>(out, residual, results, row, [&](int n, float (&values)[2]) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if constexpr (Columns::kPaired) {
            values[e] = Traits::Activation::value(acc[m][2 * n][2 * half + e]) * acc[m][2 * n + 1][2 * half + e];
          } else {
            values[e] = Traits::Activation::value(acc[m][n][2 * half + e]);
          }
        }
      });
    }
  }
}
