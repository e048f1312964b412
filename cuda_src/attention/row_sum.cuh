// A row whose keys were split: a warp adds up its parts, exactly, normalises the sum, the row's sink included, and
// writes it and its log-sum-exp. A lane has the columns lane, lane + 32, ...
//
//   m = max_c m_c,   l = sum_c exp(m_c - m) l_c,   out = sum_c exp(m_c - m) acc_c / l,   lse = m + log l
#pragma once

#include "../common/reduce.cuh"
#include "scores.cuh"
#include "sinks.cuh"

template <int kHeadDim>
struct RowSum {
  static constexpr int kColumns = div_up(kHeadDim, kWarpSize);
  static constexpr float kLowest = -3.402823466e38f;  // no score is below it: finite, so that differences are numbers

  float m = kLowest, l = 0.f, acc[kColumns] = {};

  __device__ __forceinline__ static int column(int i) { return i * kWarpSize + lane_index(); }
  __device__ __forceinline__ static bool has(int i) { return (i + 1) * kWarpSize <= kHeadDim || column(i) < kHeadDim; }

  // A part of the row times `weight`, from where its first column is.
  __device__ __forceinline__ void add(const float* part, float weight) {
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
      if (has(i)) acc[i] = __fmaf_rn(weight, part[column(i)], acc[i]);
    }
  }

  // Parts of the same row, each with its maximum and its sum.
  template <int kParts>
  __device__ __forceinline__ void add(const RowSum (&parts)[kParts]) {
    float top = m;
#pragma unroll
    for (int p = 0; p < kParts; p++) top = fmaxf(top, parts[p].m);
    const float factor = ex2_approx(m - top);
    m = top;
    l *= factor;
#pragma unroll
    for (int i = 0; i < kColumns; i++) acc[i] *= factor;
#pragma unroll
    for (int p = 0; p < kParts; p++) {
      const float weight = ex2_approx(parts[p].m - m);
      l = __fmaf_rn(weight, parts[p].l, l);
#pragma unroll
      for (int i = 0; i < kColumns; i++) acc[i] = __fmaf_rn(weight, parts[p].acc[i], acc[i]);
    }
  }

  __device__ __forceinline__ void load(const float* part, float2 maximum_and_sum) {
    m = maximum_and_sum.x;
    l = maximum_and_sum.y;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
      if (has(i)) acc[i] = part[column(i)];
    }
  }

  // Every `step`th of the parts from `first` to `last`; each has a row of `parts_g` and of `sums_g`. To wait for memory
  // is all that takes time: kTogether of them are on the way at once, in 32 registers.
  template <typename RowOf>
  __device__ __forceinline__ void add_parts(int first, int last, int step, RowOf row_of, const float* parts_g,
                                            const float2* sums_g) {
    constexpr int kTogether = 32 / round_up(kColumns, 4);
    for (int begin = first; begin <= last; begin += step * kTogether) {
      RowSum parts[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        const int part = begin + i * step;
        if (part > last) continue;
        const int64 row = row_of(part);
        parts[i].load(parts_g + row * kHeadDim, sums_g[row]);
      }
      add(parts);
    }
  }

  __device__ __forceinline__ void store(float* part) const {
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
      if (has(i)) part[column(i)] = acc[i];
    }
  }

  template <typename Sinks, typename Scalar>
  __device__ __forceinline__ void write(const AttentionParams& params, int batch, int head, int token,
                                        const void* sinks_g, Scalar* out_g, float* lse_g) const {
    float total = l, scale = 1.f, top = m;
    if constexpr (kGiven<Sinks>) {  // one more term of the denominator
      const float sink = sink_log2<Sinks>(sinks_g, params, head);
      top = fmaxf(m, sink);
      scale = ex2_approx(m - top);
      total = l * scale + ex2_approx(sink - top);
    }
    const float normaliser = total == 0.f ? 0.f : scale / total;  // no key: 0; a NaN stays one
    Scalar* row_g = head_rows(out_g, params.out, batch, head, token);
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
      if (has(i)) row_g[column(i)] = from_float<Scalar>(acc[i] * normaliser);
    }
    if (lse_g != nullptr && lane_index() == 0) {
      const float lse = total == 0.f ? -kInfinity : (top + lg2_approx(total)) * kLn2;
      *head_rows(lse_g, params.lse, batch, head, token) = lse;
    }
  }
};
