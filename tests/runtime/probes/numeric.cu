// Probe of numeric.cuh and vec.cuh: every item goes through float32 and back, and through ex2 and lg2.
#include "common/vec.cuh"

extern "C" __global__ void probe_numeric(const DTYPE* x_g, float* float_g, DTYPE* rounded_g, float* ex2_g, float* lg2_g,
                                         int count) {
  const int first = (blockIdx.x * THREADS + threadIdx.x) * VEC;
  if (first >= count) return;
  float x[VEC], doubled[VEC];
  load_vec(x, x_g + first);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    float_g[first + i] = x[i];
    ex2_g[first + i] = ex2_approx(x[i]);
    lg2_g[first + i] = lg2_approx(x[i]);
    doubled[i] = 1.0009765625f * x[i];  // needs rounding to every narrower dtype
  }
  store_vec(rounded_g + first, doubled);
}
