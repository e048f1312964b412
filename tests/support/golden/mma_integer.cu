// Golden vectors of mma.m8n8k16 of 8-bit and mma.m8n8k32 of 4-bit integers, and from compute capability 8.0 on of
// m16n8k16 and m16n8k32 of 8-bit integers, wrapped and saturated: a warp per CTA. Each lane gives its registers, so that
// the vectors pin the layout of the fragments. Two products follow each other, the second onto the first.
#include "common/config.cuh"

// Registers of a lane lie together: 1 of A and of B for each product, 2 of C. `results` has for every form the sums
// after the first product, after the second, and after both without a use of the sums between them.
#define FORM(NUMBER, SHAPE, LIMIT, A, B)                                                                             \
  {                                                                                                                  \
    int d[2] = {c[0], c[1]}, chained[2] = {c[0], c[1]};                                                              \
    int* form = results_g + (NUMBER) * 3 * 2 * lanes;                                                                \
    for (int step = 0; step < 2; step++) {                                                                           \
      asm volatile("mma.sync.aligned." SHAPE ".row.col" LIMIT ".s32." A "." B ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};" \
                   : "+r"(d[0]), "+r"(d[1])                                                                          \
                   : "r"(a[step]), "r"(b[step]));                                                                    \
      for (int i = 0; i < 2; i++) form[2 * (step * lanes + at) + i] = d[i];                                          \
    }                                                                                                                \
    asm volatile("mma.sync.aligned." SHAPE ".row.col" LIMIT ".s32." A "." B ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};"   \
                 : "+r"(chained[0]), "+r"(chained[1])                                                                \
                 : "r"(a[0]), "r"(b[0]));                                                                            \
    asm volatile("mma.sync.aligned." SHAPE ".row.col" LIMIT ".s32." A "." B ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};"   \
                 : "+r"(chained[0]), "+r"(chained[1])                                                                \
                 : "r"(a[1]), "r"(b[1]));                                                                            \
    for (int i = 0; i < 2; i++) form[2 * (2 * lanes + at) + i] = chained[i];                                         \
  }
#define FORMS(NUMBER, SHAPE, LIMIT, BITS)            \
  FORM(NUMBER, SHAPE, LIMIT, "s" BITS, "s" BITS)     \
  FORM(NUMBER + 1, SHAPE, LIMIT, "s" BITS, "u" BITS) \
  FORM(NUMBER + 2, SHAPE, LIMIT, "u" BITS, "s" BITS) \
  FORM(NUMBER + 3, SHAPE, LIMIT, "u" BITS, "u" BITS)

extern "C" __global__ void golden_mma_integer(const uint32* a_g, const uint32* b_g, const int* c_g, int* results_g) {
  const int at = blockIdx.x * kWarpSize + lane_index(), lanes = gridDim.x * kWarpSize;
  const uint32 a[2] = {a_g[2 * at], a_g[2 * at + 1]}, b[2] = {b_g[2 * at], b_g[2 * at + 1]};
  const int c[2] = {c_g[2 * at], c_g[2 * at + 1]};
  FORMS(0, "m8n8k16", "", "8")
  FORMS(4, "m8n8k16", ".satfinite", "8")
  FORMS(8, "m8n8k32", "", "4")
  FORMS(12, "m8n8k32", ".satfinite", "4")
}

#if __CUDA_ARCH__ >= 800
#define TALL(SHAPE, LIMIT, A, B, D, C, ...)                                         \
  asm volatile("mma.sync.aligned." SHAPE ".row.col" LIMIT ".s32." A "." B ".s32 " C \
               : "+r"(D[0]), "+r"(D[1]), "+r"(D[2]), "+r"(D[3])                     \
               : __VA_ARGS__)
#define K16 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
#define K32 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#define SHORT(LIMIT, A, B, D, STEP) \
  TALL("m16n8k16", LIMIT, A, B, D, K16, "r"(a[4 * STEP]), "r"(a[4 * STEP + 1]), "r"(b[2 * STEP]))
#define LONG(LIMIT, A, B, D, STEP)                                                                    \
  TALL("m16n8k32", LIMIT, A, B, D, K32, "r"(a[4 * STEP]), "r"(a[4 * STEP + 1]), "r"(a[4 * STEP + 2]), \
       "r"(a[4 * STEP + 3]), "r"(b[2 * STEP]), "r"(b[2 * STEP + 1]))
// `results` has for every form the sums after the first product, after the second, and after both.
#define TALL_FORM(PRODUCT, LIMIT, A, B)                                        \
  {                                                                            \
    int d[4] = {c[0], c[1], c[2], c[3]}, both[4] = {c[0], c[1], c[2], c[3]};   \
    PRODUCT(LIMIT, A, B, d, 0);                                                \
    for (int i = 0; i < 4; i++) results_g[4 * at + i] = d[i];                  \
    PRODUCT(LIMIT, A, B, d, 1);                                                \
    for (int i = 0; i < 4; i++) results_g[4 * (lanes + at) + i] = d[i];        \
    PRODUCT(LIMIT, A, B, both, 0);                                             \
    PRODUCT(LIMIT, A, B, both, 1);                                             \
    for (int i = 0; i < 4; i++) results_g[4 * (2 * lanes + at) + i] = both[i]; \
    results_g += 3 * 4 * lanes;                                                \
  }
#define TALL_FORMS(PRODUCT, LIMIT)      \
  TALL_FORM(PRODUCT, LIMIT, "s8", "s8") \
  TALL_FORM(PRODUCT, LIMIT, "s8", "u8") \
  TALL_FORM(PRODUCT, LIMIT, "u8", "s8") \
  TALL_FORM(PRODUCT, LIMIT, "u8", "u8")

extern "C" __global__ void golden_mma_integer_tall(const uint32* a_g, const uint32* b_g, const int* c_g,
                                                   int* results_g) {
  const int at = blockIdx.x * kWarpSize + lane_index(), lanes = gridDim.x * kWarpSize;
  uint32 a[8], b[4];
  int c[4];
  for (int i = 0; i < 8; i++) a[i] = a_g[8 * at + i];
  for (int i = 0; i < 4; i++) b[i] = b_g[4 * at + i], c[i] = c_g[4 * at + i];
  TALL_FORMS(SHORT, "")
  TALL_FORMS(SHORT, ".satfinite")
  TALL_FORMS(LONG, "")
  TALL_FORMS(LONG, ".satfinite")
}
#endif
