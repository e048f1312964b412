// Golden vectors of ldmatrix and movmatrix: a warp per CTA, with its own matrix elements and order of rows.
#include "common/config.cuh"

constexpr int kRows = 32, kRowWords = 4;  // 8 halves a row

#define LOAD(count, trans, registers)                                               \
  {                                                                                 \
    uint32 r[4] = {};                                                               \
    asm volatile("ldmatrix.sync.aligned.m8n8." count trans ".shared.b16 " registers \
                 : OUTPUTS                                                          \
                 : "r"(address)                                                     \
                 : "memory");                                                       \
    for (int i = 0; i < 4; i++) results_g[4 * at + i] = r[i];                       \
    results_g += 4 * gridDim.x * kWarpSize;                                         \
  }

extern "C" __global__ void golden_ldmatrix(const uint32* words_g, const uint32* rows_g, uint32* results_g,
                                           uint32* transposed_g) {
  __shared__ alignas(16) uint32 tile_s[kRows * kRowWords];
  const int at = blockIdx.x * kWarpSize + lane_index();
  for (int i = 0; i < kRowWords; i++) {
    tile_s[i * kWarpSize + lane_index()] = words_g[kRowWords * kWarpSize * blockIdx.x + i * kWarpSize + lane_index()];
  }
  __syncthreads();
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(tile_s + kRowWords * rows_g[at]));
#define OUTPUTS "+r"(r[0])
  LOAD("x1", "", "{%0}, [%1];")
  LOAD("x1", ".trans", "{%0}, [%1];")
#undef OUTPUTS
#define OUTPUTS "+r"(r[0]), "+r"(r[1])
  LOAD("x2", "", "{%0, %1}, [%2];")
  LOAD("x2", ".trans", "{%0, %1}, [%2];")
#undef OUTPUTS
#define OUTPUTS "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
  LOAD("x4", "", "{%0, %1, %2, %3}, [%4];")
  LOAD("x4", ".trans", "{%0, %1, %2, %3}, [%4];")
#undef OUTPUTS

  uint32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(words_g[at]));
  transposed_g[at] = turned;
}
