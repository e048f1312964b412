// Golden vectors of mma.m16n8k16, which PTX has from compute capability 8.0 on: a warp per CTA. Each lane gives its
// registers, so that the vectors pin the layout of the fragments. Two products follow each other, the second onto the
// first.
#include "common/config.cuh"

__device__ __forceinline__ void mma_single(float (&d)[4], const uint32* a, const uint32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_half(uint32 (&d)[2], const uint32* a, const uint32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(d[0]), "+r"(d[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Registers of a lane lie together: 4 of A for each product, 2 of B, 4 float32 or 2 packed pairs of C.
extern "C" __global__ void golden_mma_k16(const uint32* a_g, const uint32* b_g, const float* c_single_g,
                                          const uint32* c_half_g, float* d_single_g, uint32* d_half_g,
                                          float* chained_g) {
  const int at = blockIdx.x * kWarpSize + lane_index(), lanes = gridDim.x * kWarpSize;
  uint32 a[8], b[4];
  for (int i = 0; i < 8; i++) a[i] = a_g[8 * at + i];
  for (int i = 0; i < 4; i++) b[i] = b_g[4 * at + i];
  float d[4], chained[4];
  uint32 h[2];
  for (int i = 0; i < 4; i++) d[i] = chained[i] = c_single_g[4 * at + i];
  for (int i = 0; i < 2; i++) h[i] = c_half_g[2 * at + i];
  for (int step = 0; step < 2; step++) {  // the results between the products are wanted
    mma_single(d, a + 4 * step, b + 2 * step);
    mma_half(h, a + 4 * step, b + 2 * step);
    for (int i = 0; i < 4; i++) d_single_g[4 * (step * lanes + at) + i] = d[i];
    for (int i = 0; i < 2; i++) d_half_g[2 * (step * lanes + at) + i] = h[i];
  }
  mma_single(chained, a, b);
  mma_single(chained, a + 4, b + 2);
  for (int i = 0; i < 4; i++) chained_g[4 * at + i] = chained[i];
}
