// The online softmax of a row that a group of threads reads: each thread its own part, in batches of row segments.
//
// A batch raises the maximum once, so that its exponentials are independent of each other until they are summed.
#pragma once

#include "../common/online_softmax.cuh"
#include "../common/rows.cuh"

using RowSoftmax = OnlineSoftmax<Unit::kNatural>;

// Adds a batch of scores. With kKeepWeights their weights replace them, for the maximum of the thread after the batch.
template <bool kKeepWeights, int kSegments, int kVec>
__device__ __forceinline__ void fold(RowSoftmax& softmax, float (&s)[kSegments][kVec]) {
  float largest = s[0][0];
#pragma unroll
  for (int segment = 0; segment < kSegments; segment++) {
#pragma unroll
    for (int i = 0; i < kVec; i++) largest = fmaxf(largest, s[segment][i]);
  }
  softmax.raise(largest);
  float sum[kVec] = {};  // columns apart, so that no addition waits for the one before it
#pragma unroll
  for (int segment = 0; segment < kSegments; segment++) {
#pragma unroll
    for (int i = 0; i < kVec; i++) {
      const float weight = softmax.weight(s[segment][i]);
      if (kKeepWeights) s[segment][i] = weight;
      sum[i] += weight;
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; i++) softmax.l += sum[i];
}

// Merges the maximum and sum of each thread's part of the row to those of the whole row, for all threads of the row.
// Returns the factor that turns a thread's own weights into the row's.
template <typename Rows>
__device__ __forceinline__ float merge_row(RowSoftmax& softmax, float* partial_s) {
  const float factor = softmax.raise(row_reduce<Max, Rows>(softmax.m, partial_s));
  softmax.l = row_reduce<Sum, Rows>(softmax.l, partial_s);
  return factor;
}
