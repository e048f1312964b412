// The epilogue of a forward in float32 arithmetic: bias, activation, residual, store.
#pragma once

#include "product.cuh"

// The arrays of one call; b, residual and preactivation may be null.
template <typename Scalar>
struct ForwardArrays {
  const Scalar* b;
  const Scalar* residual;
  Scalar* out;
  Scalar* preactivation;
};

// x w + b of four columns from `column` of w on.
template <int kVec, typename Scalar>
__device__ __forceinline__ void add_bias(float (&z)[kGroup], const Scalar* b, int64 column, int64 count) {
  float bias[kGroup] = {};
  if (b != nullptr) load_group<kVec>(bias, b + column, count);
#pragma unroll
  for (int k = 0; k < kGroup; k++) z[k] += bias[k];
}

// Four neighbouring items of a result, after the activation.
template <int kVec, typename Scalar>
__device__ __forceinline__ void store_result(float (&y)[kGroup], const ForwardArrays<Scalar>& arrays,
                                             const FloatProductParams& params, int64 row, int64 column, int64 count) {
  if (arrays.residual != nullptr) {
    float more[kGroup] = {};
    load_group<kVec>(more, arrays.residual + row * params.residual_stride + column, count);
#pragma unroll
    for (int k = 0; k < kGroup; k++) y[k] += more[k];
  }
  store_group<kVec>(arrays.out + row * params.result_stride + column, y, count);
}

// The tile whose products are z: its first row, and its first column of the result.
template <typename Tile, typename Act, bool kGated, int kVec, typename Scalar>
__device__ __forceinline__ void store_activated(const float (&z)[kThreadRows][kThreadColumns],
                                                const ForwardArrays<Scalar>& arrays, const FloatProductParams& params,
                                                int64 first_row, int64 first_column) {
  const Lines<kGated> columns{first_column, params.columns};
#pragma unroll
  for (int i = 0; i < kThreadRows; i++) {
    const int64 row = first_row + Tile::row(i);
    if (row >= params.rows) continue;
    float groups[kThreadColumns / kGroup][kGroup];
#pragma unroll
    for (int g = 0; g < kThreadColumns / kGroup; g++) {
      const int local = Tile::column(g * kGroup);
      const int64 column = columns.place(local), count = columns.left(local);
#pragma unroll
      for (int k = 0; k < kGroup; k++) groups[g][k] = z[i][g * kGroup + k];
      add_bias<kVec>(groups[g], arrays.b, column, count);
      if (arrays.preactivation != nullptr) {
        store_group<kVec>(arrays.preactivation + row * params.preactivation_stride + column, groups[g], count);
      }
      if constexpr (!kGated) {
#pragma unroll
        for (int k = 0; k < kGroup; k++) groups[g][k] = Act::value(groups[g][k]);
        store_result<kVec>(groups[g], arrays, params, row, column, count);
      }
    }
    if constexpr (kGated) {
      const int64 column = columns.place(Tile::column(0)), count = columns.left(Tile::column(0));
#pragma unroll
      for (int k = 0; k < kGroup; k++) groups[0][k] = Act::value(groups[0][k]) * groups[1][k];
      store_result<kVec>(groups[0], arrays, params, row, column, count);
    }
  }
}
