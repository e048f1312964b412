// The statistics of the rows, as the backward kernels keep them in scratch memory: what P and dS need of the forward.
//
// P of bfloat16, whose exponents are float32's, is formed as it is. P of float16 is formed times 2^(kBoostLog2 - 112):
// 2^-112 gives its float32 exponent field the value that float16 has there, so that packing needs no conversion, and
// the boost uses float16's range (P is at most 1: the row's sum is known, there is no stale maximum). With
// L = lse * log2(e) - kShiftedLog2 and D = delta * kUnshifted,
//   2^(s_log2 - L) = P * 2^kShiftedLog2   and   2^(s_log2 - L) * (dP * kUnshifted - D) = P * (dP - delta).
// Rows without a key, and padding rows, have L = +inf and D = 0: P and dS are 0 without a branch.
#pragma once

#if !defined(DTYPE)
#error "DTYPE, that of q, k, v and dout, comes from a launch-configuration table"
#endif
#include "../../common/mma.cuh"
#include "../backward_params.cuh"

constexpr float kBoostLog2 = kNarrowRange<DTYPE> ? 14.f : 0.f;
constexpr float kUnboost = kNarrowRange<DTYPE> ? 1.f / 16384.f : 1.f;  // 2^-kBoostLog2
constexpr float kShiftedLog2 = kNarrowRange<DTYPE> ? kBoostLog2 - 112.f : 0.f;
constexpr float kShifted = kNarrowRange<DTYPE> ? 3.1554436208840472e-30f : 1.f;    // 2^kShiftedLog2
constexpr float kUnshifted = kNarrowRange<DTYPE> ? 3.1691265005705735e+29f : 1.f;  // 2^-kShiftedLog2

constexpr int kStatisticsBytes = 2 * sizeof(float);  // of a row

// A row's L, by its place in the scratch; its delta lies two floats further. Even rows share 16 bytes with the next.
__device__ __forceinline__ int64 statistics_offset(uint32 row) { return static_cast<int64>(row / 2) * 4 + row % 2; }

// Statistics of the two queries that a thread holds in each n8 tile, if queries lie along n8.
template <int kNTiles>
struct QueryStatistics {
  float4 pairs[kNTiles];

  __device__ __forceinline__ explicit QueryStatistics(const float* rows_g) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) pairs[n] = ld_global_v4(rows_g + n * 16 + lane_index() % 4 * 4);
  }
  // From rows in shared memory.
  __device__ __forceinline__ explicit QueryStatistics(uint32 rows_s) {
#pragma unroll
    for (int n = 0; n < kNTiles; n++) {
      pairs[n] = __builtin_bit_cast(float4, ld_shared_v4(rows_s + n * 8 * kStatisticsBytes + lane_index() % 4 * 16));
    }
  }
  __device__ __forceinline__ float l(int n, int, int e) const { return e % 2 ? pairs[n].y : pairs[n].x; }
  __device__ __forceinline__ float delta(int n, int, int e) const { return e % 2 ? pairs[n].w : pairs[n].z; }
};

// Statistics of the rows that a thread holds, if queries lie along m16. Rows beyond Sq count as rows without a key.
template <int kMTiles>
struct RowStatistics {
  float row_l[kMTiles][2], row_delta[kMTiles][2];

  __device__ __forceinline__ RowStatistics(const float* statistics_g, const BackwardParams& params, int batch, int head,
                                           int first_row) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + 16 * i + 8 * half + lane_index() / 4;
        const float* row_g = statistics_g + statistics_offset(scratch_row(params, batch, head, row));
        const bool exists = row < params.attention.sq;
        row_l[i][half] = exists ? row_g[0] : kInfinity;
        row_delta[i][half] = exists ? row_g[2] : 0.f;
      }
    }
  }
  // See Softmax::renew.
  __device__ __forceinline__ void renew() {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        row_l[i][half] = kept_in_register(row_l[i][half]);
        row_delta[i][half] = kept_in_register(row_delta[i][half]);
      }
    }
  }
  __device__ __forceinline__ float l(int, int i, int e) const { return row_l[i][e / 2]; }
  __device__ __forceinline__ float delta(int, int i, int e) const { return row_delta[i][e / 2]; }
};
