// Barriers of some of a CTA's warps, named as their instruction. Barrier 0 is that of __syncthreads.
#pragma once

#include "config.cuh"

// Wait until `threads` threads, whole warps, are at barrier `identifier` (0 to 15); what they wrote to shared memory
// before can be read behind it.
__device__ __forceinline__ void bar_sync(int identifier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}
