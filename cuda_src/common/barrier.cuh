// Barriers of all warps of a CTA (cooperative thread array, CUDA's thread block), or of some of them.
#pragma once

#include "config.cuh"

// Barrier 0, of all threads of the CTA.
struct CtaBarrier {
  __device__ __forceinline__ static void wait() { __syncthreads(); }
};

// `bar.sync`: wait until `threads` threads (whole warps) have reached barrier `identifier` (0 to 15). After it, all of
// them can read what any of them wrote to shared memory before it. Unlike __syncthreads, threads may reach it from
// different places in the code.
__device__ __forceinline__ void bar_sync(int identifier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}

// `bar.arrive`: count as one of the threads that a bar_sync of others waits for, and go on. They can then read what
// this thread wrote to shared memory before it.
__device__ __forceinline__ void bar_arrive(int identifier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}
