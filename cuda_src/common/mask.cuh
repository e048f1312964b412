// Which keys a query sees, as one interval.
//
// Query i stands at key position i + q_offset. Causal order, a sliding window and the number of keys in use each cut
// the keys to an interval, and so does any combination of them: a score is kept if begin <= j < end.
#pragma once

#include "config.cuh"

constexpr int64 kUnbounded = 1LL << 62;  // a window side without a limit

struct KeyRange {
  int begin, end;

  __device__ __forceinline__ bool contains(int key) const { return begin <= key && key < end; }
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

__device__ __forceinline__ int64 clamp(int64 x, int64 low, int64 high) { return min(max(x, low), high); }

// The keys that a query at `position` sees: left of it up to `left` keys, right of it up to `right`, of `keys` in all.
__device__ __forceinline__ KeyRange visible_keys(int64 position, int64 left, int64 right, int keys) {
  const int64 first = left == kUnbounded ? 0 : position - left;
  const int64 last = right == kUnbounded ? keys : position + right;
  return {static_cast<int>(clamp(first, 0, keys)), static_cast<int>(clamp(last + 1, 0, keys))};
}
