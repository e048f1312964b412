// Cross-entropy of each row's logits with its label, forward.
//
//   loss = lse - (1 - e) x_y - (e / V) sum_j x_j + z lse^2,     lse = m + log sum_j exp(x_j - m)
//
// for the label y, label smoothing e, and the weight z of the z loss (de Brebisson and Vincent, arXiv:1604.08859). The
// logits are read once, by the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3); with SMOOTHED
// they are summed too. The loss is computed from differences from m, so that large logits lose no digits.
//
// Shapes    logits (..., V) of any outer strides, last axis contiguous; labels one a row of any strides; losses and lse
//           one float32 a row (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats, whose loads are in flight together; shared memory: one float per warp.
// Edges     the row of an ignored label has loss 0; the row of a label outside the vocabulary has NaN, and no logit is
//           read for that label. Rows of -inf, and rows with a NaN or +inf, have a loss of NaN.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(LABELS_DTYPE) || !defined(WITH_LSE) || !defined(SMOOTHED)
#error \
    "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT, LABELS_DTYPE, WITH_LSE, SMOOTHED come from a launch-configuration table"
#endif
#include "../softmax/online_row.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<4>;
enum Array { kLogits, kLabels, kLosses, kLse };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(!Rows::kResident, "a row is read once, and not kept");

using Batch = float[Rows::kSegments][Rows::kVec];

__device__ __forceinline__ void load_batch(Batch& x, const Scalar* row_g, int64 batch, int64 length) {
#pragma unroll
  for (int segment = 0; segment < Rows::kSegments; segment++) {
    load_segment<Rows>(x[segment], row_g, batch * Rows::kSegments + segment, length, -kInfinity);
  }
}

// Columns beyond the row, which are loaded as -inf, count as zeros.
__device__ __forceinline__ float sum_of(const Batch& x, int64 batch, int64 length) {
  float sum[Rows::kVec] = {};  // columns apart, so that no addition waits for the one before it
#pragma unroll
  for (int segment = 0; segment < Rows::kSegments; segment++) {
    const bool inside = segment_column<Rows>(batch * Rows::kSegments + segment) < length;
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) sum[i] += inside ? x[segment][i] : 0.f;
  }
  float total = sum[0];
#pragma unroll
  for (int i = 1; i < Rows::kVec; i++) total += sum[i];
  return total;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_forward(const Scalar* logits_g, const LABELS_DTYPE* labels_g, float* losses_g, float* lse_g,
                          int64 ignore_index, float label_smoothing, float z_loss, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  const int64 row = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  const bool exists = row < params.rows;  // a warp may hold rows beyond the last: they take part with no columns
  const Scalar* row_g = logits_g + row_offset(params, kLogits, exists ? row : 0);
  const int64 label = exists ? labels_g[row_offset(params, kLabels, row)] : 0;
  const bool ignored = label == ignore_index;
  const bool inside = exists && 0 <= label && label < params.length;
  const float target = inside ? to_float(row_g[label]) : 0.f;
  const int64 length = exists && (WITH_LSE || !ignored) ? params.length : 0;  // rows without a result are not read

  RowSoftmax softmax;
  float sum = 0.f;
  for (int64 batch = 0; batch < Rows::batches(length); batch++) {
    Batch x;
    load_batch(x, row_g, batch, length);
    if (SMOOTHED) sum += sum_of(x, batch, length);
    fold<false>(softmax, x);
  }
  merge_row<Rows>(softmax, partial_s);
  if (SMOOTHED) sum = row_reduce<Sum, Rows>(sum, partial_s);
  if (!exists || threadIdx.x % Rows::kLanes != 0) return;

  const float lse = softmax.lse();
  float loss = lg2_approx(softmax.l) * kLn2 + (1.f - label_smoothing) * (softmax.m - target);
  if (SMOOTHED) loss += label_smoothing * (softmax.m - sum / params.length);
  loss += z_loss * lse * lse;
  loss = ignored ? 0.f : (inside ? loss : kNaN);
  losses_g[row_offset(params, kLosses, row)] = loss;
  if (WITH_LSE) lse_g[row_offset(params, kLse, row)] = lse;
}
