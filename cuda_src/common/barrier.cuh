// Barriers of all warps of a CTA (cooperative thread array, a block of threads), or of some.
#pragma once

#include "config.cuh"

// The barrier number 0: of all threads.
struct CtaBarrier {
  __device__ __forceinline__ static void wait() { __syncthreads(); }
};

// `bar.sync`: wait until kThreads threads, whole warps, are at barrier `identifier` (0 to 15); what they wrote to
// shared memory before can be read behind it. They may reach it from different places in the code, which __syncthreads
// forbids.
__device__ __forceinline__ void bar_sync(int identifier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}
