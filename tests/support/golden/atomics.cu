// Golden vectors of atom and red: one CTA, in which each thread first updates a cell of its own (which shows the old
// value and the new), then all threads update few cells, in operations whose order does not matter.
//
// OPERATIONS is a list of OWN_GLOBAL(text), OWN_SHARED(text), CONTESTED_GLOBAL(text) and CONTESTED_SHARED(text),
// written by tests/support/golden/atomics.py.
#include "common/config.cuh"

#if !defined(OPERATIONS) || !defined(CELLS) || !defined(TYPE) || !defined(CONSTRAINT)
#error "golden/atomics.cu takes OPERATIONS, CELLS, TYPE and CONSTRAINT"
#endif

#define OWN(text, address_constraint, cells, address)                                        \
  {                                                                                          \
    TYPE old, *cell = cells + thread;                                                        \
    *cell = initial_g[thread];                                                               \
    asm volatile(text                                                                        \
                 : "=" CONSTRAINT(old)                                                       \
                 : address_constraint(address(cell)), CONSTRAINT(value), CONSTRAINT(swapped) \
                 : "memory");                                                                \
    old_g[thread] = old;                                                                     \
    new_g[thread] = *cell;                                                                   \
    old_g += THREADS;                                                                        \
    new_g += THREADS;                                                                        \
  }
#define CONTESTED(text, address_constraint, cells, address)                                         \
  {                                                                                                 \
    __syncthreads();                                                                                \
    if (thread < CELLS) cells[thread] = initial_g[thread];                                          \
    __syncthreads();                                                                                \
    asm volatile(text                                                                               \
                 :                                                                                  \
                 : address_constraint(address(cells + thread % CELLS)), CONSTRAINT(contested_value) \
                 : "memory");                                                                       \
    __syncthreads();                                                                                \
    if (thread < CELLS) contested_g[thread] = cells[thread];                                        \
    contested_g += CELLS;                                                                           \
  }
#define OWN_GLOBAL(text) OWN(text, "l", cells_g, __cvta_generic_to_global)
#define OWN_SHARED(text) OWN(text, "r", cells_s, shared_address)
#define CONTESTED_GLOBAL(text) CONTESTED(text, "l", cells_g, __cvta_generic_to_global)
#define CONTESTED_SHARED(text) CONTESTED(text, "r", cells_s, shared_address)

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

extern "C" __global__ void golden_atomics(const TYPE* initial_g, const TYPE* values_g, const TYPE* swapped_g,
                                          const TYPE* contested_values_g, TYPE* old_g, TYPE* new_g, TYPE* contested_g,
                                          TYPE* cells_g) {
  __shared__ TYPE cells_s[THREADS];
  const int thread = threadIdx.x;
  const TYPE value = values_g[thread], swapped = swapped_g[thread], contested_value = contested_values_g[thread];
  OPERATIONS
}
