// A rotated pair of features, and how a thread reads its cosines and sines.
#pragma once

#include "../common/vec.cuh"

// One rotated feature of a pair; `other` is the pair's other feature. `turn` is the angle's sine for the second feature
// of the pair and minus the sine for the first. Written out, so that every kernel that rotates gives the same bits.
__device__ __forceinline__ float rotated(float x, float other, float cos, float signed_sin) {
  return __fmaf_rn(x, cos, other * signed_sin);
}

// kItems neighbouring items of a table: at most 16 bytes at a time if they are aligned (kWhole), otherwise item by
// item.
template <bool kWhole, int kItems, typename Table>
__device__ __forceinline__ void load_table(float (&values)[kItems], const Table* source) {
  constexpr int kMost = kWhole ? kVectorBytes / static_cast<int>(sizeof(Table)) : 1;
  constexpr int kPiece = kItems < kMost ? kItems : kMost;
#pragma unroll
  for (int first = 0; first < kItems; first += kPiece) {
    float piece[kPiece];
    load_vec(piece, source + first);
#pragma unroll
    for (int i = 0; i < kPiece; i++) values[first + i] = piece[i];
  }
}
