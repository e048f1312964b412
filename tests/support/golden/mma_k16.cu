// Golden vectors of the mma that PTX has from compute capability 8.0 on: m16n8k16 of float16, and m16n8k8 and m16n8k16 of
// bfloat16 (KIND, DEPTH): a warp per CTA. Each lane gives its registers, so that the vectors pin the layout of the
// fragments. Two products follow each other, the second onto the first.
#include "common/config.cuh"

#ifndef DEPTH
#define DEPTH 16
#define KIND "f16"
#define HALVES 1  // sums of bfloat16 are float32 only
#endif

#if DEPTH == 16
constexpr int kA = 4, kB = 2;  // registers of a product
#define PRODUCT(KINDS, D, C)                                    \
  asm volatile("mma.sync.aligned.m16n8k16.row.col." KINDS " " D \
               : C                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define SINGLE "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
constexpr int kA = 2, kB = 1;
#define PRODUCT(KINDS, D, C) \
  asm volatile("mma.sync.aligned.m16n8k8.row.col." KINDS " " D : C : "r"(a[0]), "r"(a[1]), "r"(b[0]))
#define SINGLE "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#endif

__device__ __forceinline__ void mma_single(float (&d)[4], const uint32* a, const uint32* b) {
#define FOUR "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
  PRODUCT("f32." KIND "." KIND ".f32", SINGLE, FOUR);
}

#ifdef HALVES
__device__ __forceinline__ void mma_half(uint32 (&d)[2], const uint32* a, const uint32* b) {
#define TWO "+r"(d[0]), "+r"(d[1])
  PRODUCT("f16.f16.f16.f16", "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};", TWO);
}
#endif

// Registers of a lane lie together: those of A for each product, those of B, 4 float32 or 2 packed pairs of C.
extern "C" __global__ void golden_mma_k16(const uint32* a_g, const uint32* b_g, const float* c_single_g,
                                          [[maybe_unused]] const uint32* c_half_g, float* d_single_g,
                                          [[maybe_unused]] uint32* d_half_g, float* chained_g) {
  const int at = blockIdx.x * kWarpSize + lane_index(), lanes = gridDim.x * kWarpSize;
  uint32 a[2 * kA], b[2 * kB];
  for (int i = 0; i < 2 * kA; i++) a[i] = a_g[2 * kA * at + i];
  for (int i = 0; i < 2 * kB; i++) b[i] = b_g[2 * kB * at + i];
  float d[4], chained[4];
  for (int i = 0; i < 4; i++) d[i] = chained[i] = c_single_g[4 * at + i];
  for (int step = 0; step < 2; step++) {  // the results between the products are wanted
    mma_single(d, a + kA * step, b + kB * step);
    for (int i = 0; i < 4; i++) d_single_g[4 * (step * lanes + at) + i] = d[i];
  }
#ifdef HALVES
  uint32 h[2];
  for (int i = 0; i < 2; i++) h[i] = c_half_g[2 * at + i];
  for (int step = 0; step < 2; step++) {
    mma_half(h, a + kA * step, b + kB * step);
    for (int i = 0; i < 2; i++) d_half_g[2 * (step * lanes + at) + i] = h[i];
  }
#endif
  mma_single(chained, a, b);
  mma_single(chained, a + kA, b + kB);
  for (int i = 0; i < 4; i++) chained_g[4 * at + i] = chained[i];
}
