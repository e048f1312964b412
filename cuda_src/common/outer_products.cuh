// Sums of outer products in registers: C += sum_d a_d b_d^T. The vectors a_d and b_d are loaded from shared memory.
//
// A thread holds its block of C and the vectors of two steps: the current ones and the prefetched next ones.
#pragma once

#include "memory.cuh"

// Load x[first] to x[first + kItems - 1] from consecutive addresses.
template <int kItems = 4, int kAll>
__device__ __forceinline__ void ld_shared_group(float (&x)[kAll], int first, uint32 address) {
  float group[kItems];
  ld_shared(group, address);
#pragma unroll
  for (int i = 0; i < kItems; i++) x[first + i] = group[i];
}

// Add kGroup steps of each of `groups` groups. load(a, b, group, step) is called once for the group after the last too.
template <int kGroup, int kRows, int kColumns, typename Load>
__device__ __forceinline__ void add_products(float (&c)[kRows][kColumns], int groups, Load load) {
  float a[kRows], b[kColumns];
  load(a, b, 0, 0);
#pragma unroll 1
  for (int group = 0; group < groups; group++) {
#pragma unroll
    for (int step = 0; step < kGroup; step++) {
      const bool last = step + 1 == kGroup;
      float next_a[kRows], next_b[kColumns];
      load(next_a, next_b, group + last, last ? 0 : step + 1);
#pragma unroll
      for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int j = 0; j < kColumns; j++) c[i][j] = __fmaf_rn(a[i], b[j], c[i][j]);
      }
#pragma unroll
      for (int i = 0; i < kRows; i++) a[i] = next_a[i];
#pragma unroll
      for (int j = 0; j < kColumns; j++) b[j] = next_b[j];
    }
  }
}
