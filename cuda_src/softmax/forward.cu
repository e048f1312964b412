// Softmax over the last axis, or its logarithm, forward.
//
//   y_j = exp(s_j - m) / l   or with LOGARITHM   y_j = (s_j - m) - log l,     m = max_j s_j,   l = sum_j exp(s_j - m)
//
// Scores s are x with its options applied (row_scores.cuh). Each thread runs the online softmax (Milakov and
// Gimelshein, arXiv:1805.02867, algorithm 3) over its part of the row, and the threads' m and l are merged. For
// RESIDENT rows the weights (with LOGARITHM the scores) stay in registers meanwhile; longer rows are read twice.
//
// Shapes    x and y of any rank and any outer strides, last axis contiguous (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats of the row; shared memory: one float per warp.
// Edges     a row of which nothing is kept, or whose scores are all -inf, gives zeros (as an attention row without
//           keys), with LOGARITHM -inf; a row with a NaN or +inf gives NaN.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(LOGARITHM)
#error "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT and LOGARITHM come from a launch-configuration table"
#endif
#include "online_row.cuh"
#include "row_scores.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<4>;
enum Array { kX, kMask, kBias, kY };
using Row = ScoreRow<Rows, Scalar, kX, kMask, kBias>;
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr bool kKeepsWeights = Rows::kResident && !LOGARITHM;  // between the passes: no second exponential

__device__ __forceinline__ void load_batch(float (&s)[Rows::kSegments][Rows::kVec], const Row& row, int64 batch) {
#pragma unroll
  for (int segment = 0; segment < Rows::kSegments; segment++) row.load(s[segment], batch * Rows::kSegments + segment);
}

// `factor` turns a value that was kept between the passes into the result: 1 / l, times the factor of the thread's own
// maximum.
__device__ __forceinline__ float result_of(float s, const RowSoftmax& softmax, float factor, float log_l) {
  if (LOGARITHM) return softmax.l == 0.f ? -kInfinity : s - softmax.m - log_l;
  return (kKeepsWeights ? s : softmax.weight(s)) * factor;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_forward(const Scalar* x_g, const MASK_DTYPE* mask_g, const BIAS_DTYPE* bias_g, Scalar* y_g,
                    int64 mask_stride, int64 bias_stride, float scale, int64 queries, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 index = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = index < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Row row(x_g, {mask_g, bias_g, mask_stride, bias_stride, scale, queries}, params, index, exists);
  Scalar* y_row_g = y_g + row_offset(params, kY, exists ? index : 0);
  const int64 length = exists ? params.length : 0;

  // Phase 1: maximum and sum, in one read.
  float s[Rows::kSegments][Rows::kVec];
  RowSoftmax softmax;
  for (int64 batch = 0; batch < Rows::batches(row.visible()); batch++) {
    load_batch(s, row, batch);
    fold<kKeepsWeights>(softmax, s);
  }
  float factor = merge_row<Rows>(softmax, partial_s);
  factor = softmax.normaliser() * (kKeepsWeights ? factor : 1.f);
  const float log_l = lg2_approx(softmax.l) * kLn2;

  // Phase 2: the results, from the registers or a second read.
  for (int64 batch = 0; batch < Rows::batches(length); batch++) {
    if (!Rows::kResident) load_batch(s, row, batch);
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
      float y[Rows::kVec];
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) y[i] = result_of(s[segment][i], softmax, factor, log_l);
      store_segment<Rows>(y_row_g, y, batch * Rows::kSegments + segment, length);
    }
  }
}
