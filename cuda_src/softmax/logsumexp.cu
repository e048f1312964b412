// The log-sum-exp of each row.
//
//   lse = m + log l,   m = max_j s_j,   l = sum_j exp(s_j - m)
//
// Scores s are x with its options applied (row_scores.cuh). A row is read once, by the online softmax (Milakov and
// Gimelshein, arXiv:1805.02867, algorithm 3).
//
// Shapes    x of any rank and any outer strides, last axis contiguous; lse one float32 a row (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats, whose loads are in flight together; shared memory: one float per warp.
// Edges     a row of which nothing is kept, or whose scores are all -inf, gives -inf; NaN and +inf give NaN.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || !defined(RESIDENT)
#error "DTYPE, THREADS, LANES, STRIPS, VEC and RESIDENT come from a launch-configuration table"
#endif
#include "online_row.cuh"
#include "row_scores.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<4>;
enum Array { kX, kMask, kBias, kLse };
using Row = ScoreRow<Rows, Scalar, kX, kMask, kBias>;
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(!Rows::kResident, "a row is read once, and not kept");

extern "C" __global__ void __launch_bounds__(THREADS)
    logsumexp(const Scalar* x_g, const MASK_DTYPE* mask_g, const BIAS_DTYPE* bias_g, float* lse_g, int64 mask_stride,
              int64 bias_stride, float scale, int64 queries, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 index = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = index < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Row row(x_g, {mask_g, bias_g, mask_stride, bias_stride, scale, queries}, params, index, exists);

  RowSoftmax softmax;
  for (int64 batch = 0; batch < Rows::batches(row.visible()); batch++) {
    float s[Rows::kSegments][Rows::kVec];
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) row.load(s[segment], batch * Rows::kSegments + segment);
    fold<false>(softmax, s);
  }
  merge_row<Rows>(softmax, partial_s);
  if (exists && threadIdx.x % Rows::kLanes == 0) lse_g[row_offset(params, kLse, index)] = softmax.lse();
}
