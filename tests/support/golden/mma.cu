// Golden vectors of mma.m16n8k8: a warp per CTA. Each lane gives its registers, so that the vectors pin the layout of
// the fragments. Two products follow each other, the second onto the first.
#include "common/config.cuh"

__device__ __forceinline__ void mma_single(float (&d)[4], const uint32* a, uint32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void mma_half(uint32 (&d)[2], const uint32* a, uint32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Registers of a lane lie together: 2 of A for each product, 1 of B, 4 float32 or 2 packed pairs of C.
extern "C" __global__ void golden_mma(const uint32* a_g, const uint32* b_g, const float* c_single_g,
                                      const uint32* c_half_g, float* d_single_g, uint32* d_half_g, float* chained_g) {
  const int at = blockIdx.x * kWarpSize + lane_index(), lanes = gridDim.x * kWarpSize;
  const uint32 a[4] = {a_g[4 * at], a_g[4 * at + 1], a_g[4 * at + 2], a_g[4 * at + 3]};
  const uint32 b[2] = {b_g[2 * at], b_g[2 * at + 1]};
  float d[4], chained[4];
  uint32 h[2];
  for (int i = 0; i < 4; i++) d[i] = chained[i] = c_single_g[4 * at + i];
  for (int i = 0; i < 2; i++) h[i] = c_half_g[2 * at + i];
  for (int step = 0; step < 2; step++) {  // the results between the products are wanted
    mma_single(d, a + 2 * step, b[step]);
    mma_half(h, a + 2 * step, b[step]);
    for (int i = 0; i < 4; i++) d_single_g[4 * (step * lanes + at) + i] = d[i];
    for (int i = 0; i < 2; i++) d_half_g[2 * (step * lanes + at) + i] = h[i];
  }
  mma_single(chained, a, b[0]);
  mma_single(chained, a + 2, b[1]);
  for (int i = 0; i < 4; i++) chained_g[4 * at + i] = chained[i];
}
