// Golden vectors of mma.m8n8k16 of 8-bit and mma.m8n8k32 of 4-bit integers, wrapped and saturated: a warp per CTA. Each
// lane gives its registers, so that the vectors pin the layout of the fragments. Two products follow each other, the
// second onto the first.
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
