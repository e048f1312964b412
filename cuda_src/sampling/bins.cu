// Sampling with top-k or top-p, second step: a histogram of the distances below a row's largest score.
//
// A token is counted, with its weight, in the bin of its distance's first digit: 1/16 in base 2 each, from the largest
// score down (bins.cuh). A CTA adds in shared memory, then to the row's bins. The sums are integers: the order does not
// matter.
//
// Shapes    logits (rows, V), last axis contiguous; previous (rows, width); maxima (rows, parts); bins (rows, 4, 1024)
//           uint32, zeroed.
// Work      a CTA for each part of PART tokens of each row.
// Budget    PART / THREADS logits of a thread in registers; 16 KB of shared memory for the bins.
// Edges     rows without top-k and top-p, greedy rows, and rows without a score leave zeros.
#if !defined(DTYPE) || !defined(THREADS) || !defined(PART) || !defined(ALIGNED) || !defined(PENALISED)
#error "DTYPE, THREADS, PART, ALIGNED and PENALISED come from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "logits.cuh"
#include "bins.cuh"

using Part = PartTraits<DTYPE, THREADS, PART, ALIGNED, PENALISED>;

struct Smem {
  Bins<THREADS> bins;
  Previous<Part> previous;
  float partial[THREADS / kWarpSize];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    sample_bins(const DTYPE* logits_g, const int* previous_g, const float* temperatures_g, const void* top_ks_g,
                const float* top_ps_g, const float* penalties_g, const float* maxima_g, uint32* bins_g,
                float temperature, int64 top_k, float top_p, float penalty, const SampleParams params) {
  __shared__ Smem smem_s;
  const int64 row = blockIdx.x / params.parts;
  const int first = blockIdx.x % params.parts * Part::kTokens;
  const RowFilters filters = {option(temperatures_g, params.temperature_stride, temperature, row),
                              option(top_ps_g, params.top_p_stride, top_p, row), 0.f,
                              integer_option(top_ks_g, params.top_k_stride, params.top_k_is_int64, top_k, row)};
  if (!filters.cuts()) return;

  // Phase 1: the part's logits, and the row's largest.
  PartLogits<Part> logits;
  logits.load(logits_g + row * params.logits_stride, first, params.vocabulary);
  smem_s.bins.clear();  // the barriers of largest_logit lie between this and the first count
  const float largest = largest_logit<THREADS>(maxima_g + row * params.parts, params.parts, smem_s.partial);
  if (largest == -kInfinity) return;
  smem_s.previous.gather(previous_g, params, row, first);

  // Phase 2: the bins of its tokens, here and then in the row.
  const float scale = score_scale(filters.temperature);
  const float row_penalty = option(penalties_g, params.repetition_penalty_stride, penalty, row);
  logits.each_group(smem_s.previous, row_penalty, [&](int, const float (&x)[Part::kItems]) {
#pragma unroll
    for (int i = 0; i < Part::kItems; i++) {
      if (x[i] == -kInfinity) continue;
      const uint32 distance = distance_of(score_of(x[i], largest, scale));
      smem_s.bins.count(first_digit(distance), weight_of(distance));
    }
  });
  __syncthreads();  // smem_s.bins: every thread has counted
  smem_s.bins.add_to(bins_g + row * (kSums * kBins));
}
