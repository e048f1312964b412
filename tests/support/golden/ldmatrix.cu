// Golden vectors of ldmatrix and movmatrix: a warp per CTA, with its own matrix elements and order of rows. From compute
// capability 8.0 on also of copies to shared memory, a lane each.
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

#if __CUDA_ARCH__ >= 800
// Each form copies the first `bytes` of its size, which may be fewer, onto a pattern.
#define COPY(FORM, SIZE)                                                                                      \
  {                                                                                                           \
    for (int i = 0; i < 4; i++) mine[i] = 0xA5A5A5A5u;                                                        \
    const int bytes = min(bytes_g[at], SIZE);                                                                 \
    asm volatile("cp.async." FORM " [%0], [%1], " #SIZE ", %2; cp.async.wait_all;" ::"r"(address), "l"(from), \
                 "r"(bytes)                                                                                   \
                 : "memory");                                                                                 \
    for (int i = 0; i < 4; i++) results_g[4 * at + i] = mine[i];                                              \
    results_g += 4 * gridDim.x * kWarpSize;                                                                   \
  }

extern "C" __global__ void golden_copies(const uint32* words_g, const int* bytes_g, uint32* results_g) {
  __shared__ alignas(16) uint32 tile_s[kRows * kRowWords];
  const int at = blockIdx.x * kWarpSize + lane_index();
  volatile uint32* mine = tile_s + kRowWords * lane_index();
  const uint32* from = words_g + kRowWords * at;
  const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(tile_s + kRowWords * lane_index()));
  COPY("ca.shared.global", 4)
  COPY("ca.shared.global", 8)
  COPY("ca.shared.global", 16)
  COPY("cg.shared.global", 16)
  COPY("cg.shared.global.L2::128B", 16)
}
#endif
