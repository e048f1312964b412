// The keys that a query sees, as one interval.
//
// Query i is at key position i + q_offset. Causal order, a sliding window and the number of keys in use each cut
// the keys to an interval, and so does any combination of them: a score is kept if begin <= j < end.
#pragma once

#include "../common/config.cuh"

constexpr int64 kUnbounded = 1LL << 62;  // a window side without a limit
constexpr int kFar = 1 << 30;            // beyond every length: a row plus or minus it stays within 32 bits

template <typename Integer>
__device__ __forceinline__ int clamp(Integer x, int low, int high) {
  return static_cast<int>(min(max(x, static_cast<Integer>(low)), static_cast<Integer>(high)));
}

// Neighbouring keys (or, of rows_of, query rows).
struct KeyRange {
  int begin, end;

  __device__ __forceinline__ bool contains(int key) const { return begin <= key && key < end; }
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// Row i of a sequence sees the keys from i + begin_shift to i + end_shift, of `keys` in all.
struct KeyWindow {
  int begin_shift, end_shift, keys;

  // Query i is at i + q_offset and sees `left` keys before that position and `right` after it.
  // All three are within 2^60, or kUnbounded.
  __device__ __forceinline__ KeyWindow(int64 q_offset, int64 left, int64 right, int keys_)
      : begin_shift(left == kUnbounded ? -kFar : clamp(q_offset - left, -kFar, kFar)),
        end_shift(right == kUnbounded ? kFar : clamp(q_offset + right + 1, -kFar, kFar)),
        keys(keys_) {}

  __device__ __forceinline__ KeyRange of_row(int row) const {
    return {clamp(row + begin_shift, 0, keys), clamp(row + end_shift, 0, keys)};
  }

  // The other way round: the rows, of `rows` in all, that see a key.
  __device__ __forceinline__ KeyRange rows_of(int key, int rows) const {
    if (key >= keys) return {0, 0};
    return {clamp(key - end_shift + 1, 0, rows), clamp(key - begin_shift + 1, 0, rows)};
  }
};
