// The gradient of softmax, or with kLogarithm of its logarithm, with respect to one score: from dout (dL/dy) and y of
// its column, and the row's sum.
//
//   y_j (dout_j - row_sum), row_sum = sum_i y_i dout_i   or   dout_j - exp(y_j) row_sum, row_sum = sum_i dout_i
//
// A column that the forward hid has a y of 0, or with kLogarithm of -inf, and its dout does not count.
#pragma once

#include "../common/numeric.cuh"

template <bool kLogarithm>
__device__ __forceinline__ float softmax_gradient(float dout, float y, float row_sum) {
  if (kLogarithm) return y == -kInfinity ? 0.f : dout - ex2_approx(y * kLog2E) * row_sum;
  return y * (dout - row_sum);
}
