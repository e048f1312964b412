// Sampling unless it is greedy, first step: the largest logit of each part of a row.
//
//   maxima_p = max over tokens j of part p of x_j, those of previous tokens divided by the penalty where they are
//              positive and otherwise multiplied (Keskar et al., CTRL, arXiv:1909.05858, section 4.1)
//
// Shapes    logits (rows, V), last axis contiguous; previous (rows, width) of any strides; maxima (rows, parts).
// Work      a CTA for each part of PART tokens of each row; it also zeroes its part of the row's bins and counters, if
//           the next launches use them.
// Budget    PART / THREADS logits of a thread in registers; shared memory: a bit for each token, a float for each warp.
// Edges     a part without tokens above -inf has -inf; NaN counts as -inf.
#if !defined(DTYPE) || !defined(THREADS) || !defined(PART) || !defined(ALIGNED) || !defined(PENALISED)
#error "DTYPE, THREADS, PART, ALIGNED and PENALISED come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "logits.cuh"
#include "bins.cuh"

using Part = PartTraits<DTYPE, THREADS, PART, ALIGNED, PENALISED>;

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_maxima(const DTYPE* logits_g, const int* previous_g, const float* penalties_g, float* maxima_g,
                  uint32* bins_g, uint32* counters_g, float penalty, const SampleParams params) {
  __shared__ Previous<Part> previous_s;
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 row = blockIdx.x / params.parts;
  const int part = blockIdx.x % params.parts, first = part * Part::kTokens;

  if (bins_g) {
    uint4* const row_bins_g = reinterpret_cast<uint4*>(bins_g) + row * (kSums * kBins / 4);
    for (int i = part * THREADS + threadIdx.x; i < kSums * kBins / 4; i += params.parts * THREADS) row_bins_g[i] = {};
  }
  if (counters_g && part == 0 && threadIdx.x < 2) counters_g[2 * row + threadIdx.x] = 0;

  PartLogits<Part> logits;
  logits.load(logits_g + row * params.logits_stride, first, params.vocabulary);
  previous_s.gather(previous_g, params, row, first);
  float largest = -kInfinity;
  const float row_penalty = option(penalties_g, params.repetition_penalty_stride, penalty, row);
  logits.each_group(previous_s, row_penalty, [&](int, const float (&x)[Part::kItems]) {
#pragma unroll
    for (int i = 0; i < Part::kItems; i++) largest = fmaxf(largest, x[i]);
  });
  largest = cta_reduce<Max, THREADS>(largest, partial_s);
  if (threadIdx.x == 0) maxima_g[blockIdx.x] = largest;
}
