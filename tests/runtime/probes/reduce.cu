// Probe of reduce.cuh: each CTA reduces its THREADS items, over warps, parts of warps and the whole CTA.
#include "common/reduce.cuh"

extern "C" __global__ void probe_reduce(const float* x_g, float* warp_sum_g, float* part_max_g, float* cta_sum_g,
                                        float* cta_max_g) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const float x = x_g[at];
  warp_sum_g[at] = warp_reduce<Sum>(x);
  part_max_g[at] = warp_reduce<Max, 8>(x);
  cta_sum_g[at] = cta_reduce<Sum, THREADS>(x, partial_s);
  cta_max_g[at] = cta_reduce<Max, THREADS>(x, partial_s);  // shares partial_s with the sum before it
}
