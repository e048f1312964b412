// Golden vectors of single instructions: each of OPERATIONS, on every item of up to four arrays of operands.
//
// OPERATIONS is a list of RUN(text, constraint, type, operands...), written by
// tests/support/golden/elementwise.py: `text` is PTX, `constraint` and `type` are of its result, and the operands are
// of `a`, `b`, `c` and `d`. Results are stored as their bits, in 64-bit words.
#include "common/config.cuh"

#if !defined(OPERATIONS) || !defined(COUNT) || !defined(TYPE_A) || !defined(TYPE_B) || !defined(TYPE_C) || \
    !defined(TYPE_D)
#error "golden/elementwise.cu takes OPERATIONS, COUNT, TYPE_A, TYPE_B, TYPE_C and TYPE_D"
#endif

__device__ __forceinline__ uint64 bits(uint16 x) { return x; }
__device__ __forceinline__ uint64 bits(uint32 x) { return x; }
__device__ __forceinline__ uint64 bits(uint64 x) { return x; }
__device__ __forceinline__ uint64 bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint64 bits(double x) { return __double_as_longlong(x); }

#define RUN(text, constraint, type, ...)          \
  {                                               \
    type result;                                  \
    asm(text : constraint(result) : __VA_ARGS__); \
    results_g[at] = bits(result);                 \
    results_g += COUNT;                           \
  }

// Operands that no instruction takes may be null: their loads are dead.
extern "C" __global__ void golden_elementwise(const TYPE_A* a_g, const TYPE_B* b_g, const TYPE_C* c_g,
                                              const TYPE_D* d_g, uint64* results_g) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= COUNT) return;
  [[maybe_unused]] const TYPE_A a = a_g[at];
  [[maybe_unused]] const TYPE_B b = b_g[at];
  [[maybe_unused]] const TYPE_C c = c_g[at];
  [[maybe_unused]] const TYPE_D d = d_g[at];
  OPERATIONS
}
