// The norm of many arrays, second step: the root of the sum of the CTAs' partial sums, added in a fixed order.
//
//   out = sqrt(sum over c of partials_c)
//
// Shapes    partials (count,) float32; out one item of DTYPE, float32.
// Work      one CTA; each thread adds every THREADS-th partial sum.
// Budget    one float per warp of shared memory; about 20 registers.
// Edges     no partial sums give 0.
#if !defined(DTYPE) || !defined(THREADS)
#error "DTYPE and THREADS come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) global_norm(const float* partials_g, DTYPE* out_g, int64 count) {
  __shared__ float partial_s[THREADS / kWarpSize];
  float sum = 0.f;
  for (int64 p = threadIdx.x; p < count; p += THREADS) sum += partials_g[p];
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  if (threadIdx.x == 0) *out_g = from_float<DTYPE>(sqrtf(sum));
}
