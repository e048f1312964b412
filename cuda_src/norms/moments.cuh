// Mean and variance of a row from its parts, without the cancellation of E[x^2] - E[x]^2.
//
// A part (the items of a thread, of a warp, of the row) keeps its sums about a pivot close to its mean:
//
//   s1 = sum of x - pivot,   s2 = sum of (x - pivot)^2
//
// The differences are exact or nearly exact, and s1 corrects the rounding of the pivot: this is the corrected two-pass
// algorithm (Chan, Golub, LeVeque, The American Statistician 37, 1983), which also gives the merging of parts.
#pragma once

#include "../common/rows.cuh"

// 1 / count, or 0 without items.
__device__ __forceinline__ float inverse(float count) { return count > 0.f ? rcp_approx(count) : 0.f; }

struct Moments {
  float count = 0.f, pivot = 0.f, s1 = 0.f, s2 = 0.f;

  template <int kItems>
  __device__ __forceinline__ void add(const float (&x)[kItems]) {
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const float deviation = x[i] - pivot;
      s1 += deviation;
      s2 += deviation * deviation;
    }
  }

  __device__ __forceinline__ void move(float to) {
    const float distance = pivot - to;
    s2 += distance * (2.f * s1 + count * distance);
    s1 += count * distance;
    pivot = to;
  }

  template <int kWidth>
  __device__ __forceinline__ void merge_lanes() {
    const float total = warp_reduce<Sum, kWidth>(count);
    move(warp_reduce<Sum, kWidth>(count * pivot) * inverse(total));
    s1 = warp_reduce<Sum, kWidth>(s1);
    s2 = warp_reduce<Sum, kWidth>(s2);
    count = total;
  }

  // The mean minus the pivot: kept apart, because one rounded sum of both would lose it if the mean is large.
  __device__ __forceinline__ float shift() const { return s1 * inverse(count); }
  __device__ __forceinline__ float variance() const {
    const float squares = s2 - s1 * shift();
    return (squares < 0.f ? 0.f : squares) * inverse(count);  // of NaN NaN
  }
};

// Merges the moments of each thread's items, about its own pivot, to those of its row. All threads of the row call it.
template <typename Rows>
struct RowMoments {
  static constexpr int kWarps = Rows::kLanes <= kWarpSize ? 1 : Rows::kLanes / kWarpSize;  // of a row
  float4 partial[kWarps > 1 ? Rows::kThreads / kWarpSize : 1];

  __device__ __forceinline__ void merge(Moments& part) {
    part.merge_lanes<Rows::kLanes / kWarps>();
    if constexpr (kWarps > 1) {
      if (lane_index() == 0) partial[warp_index()] = make_float4(part.count, part.pivot, part.s1, part.s2);
      row_barrier<Rows>();  // partial: written by every warp of the row, of which a kernel merges one
      const float4 warp = partial[warp_index() / kWarps * kWarps + lane_index() % kWarps];
      part.count = warp.x, part.pivot = warp.y, part.s1 = warp.z, part.s2 = warp.w;
      part.merge_lanes<kWarps>();
    }
  }
};
