// Cross-entropy of each row's logits with its label, backward: from dloss (dL/dloss) and the forward's lse.
//
//   dx_j = dloss ((1 + 2 z lse) exp(x_j - lse) - (1 - e) [j = y] - e / V) + dlse exp(x_j - lse)
//
// for the label y, label smoothing e, the weight z of the z loss, and the gradient dlse if lse itself was used. With
// ACCUMULATE dx_j is added to the contents of dlogits.
//
// Shapes    logits and dlogits (..., V) of any outer strides, last axis contiguous, which may be one array without
//           ACCUMULATE; labels, dloss, lse and dlse one a row of any strides, 0 if one dloss serves all rows
//           (RowsParams, rows.cuh).
// Work      LANES threads own a row; THREADS / LANES rows a CTA; grid ceil(rows / rows per CTA).
// Budget    registers: STRIPS * VEC floats, whose loads are in flight together.
// Edges     the row of an ignored label has only the part of dlse; the row of a label outside the vocabulary is NaN.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(LABELS_DTYPE) || !defined(WITH_DLSE) || !defined(ACCUMULATE)
#error \
    "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT, LABELS_DTYPE, WITH_DLSE, ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

using Scalar = DTYPE;
using Rows = RowTraits<THREADS, LANES, STRIPS, VEC, RESIDENT>;
using Params = RowsParams<6>;
enum Array { kLogits, kDloss, kLse, kDlse, kLabels, kDlogits };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");
static_assert(!Rows::kResident, "a row is read once, and not kept");

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_backward(const Scalar* logits_g, const float* dloss_g, const float* lse_g, const float* dlse_g,
                           const LABELS_DTYPE* labels_g, Scalar* dlogits_g, int64 ignore_index, float label_smoothing,
                           float z_loss, const Params params) {
  const int64 row = blockIdx.x * static_cast<int64>(Rows::kRowsPerCta) + threadIdx.x / Rows::kLanes;
  if (row >= params.rows) return;
  const Scalar* row_g = logits_g + row_offset(params, kLogits, row);
  Scalar* dlogits_row_g = dlogits_g + row_offset(params, kDlogits, row);
  const int64 label = labels_g[row_offset(params, kLabels, row)];
  const bool ignored = label == ignore_index;
  const bool inside = 0 <= label && label < params.length;
  const float lse = lse_g[row_offset(params, kLse, row)];
  const float given = inside ? dloss_g[row_offset(params, kDloss, row)] : kNaN;
  const float dloss = ignored ? 0.f : given;
  const float dlse = WITH_DLSE ? dlse_g[row_offset(params, kDlse, row)] : 0.f;
  const float of_weight = (ignored ? 0.f : dloss * (1.f + 2.f * z_loss * lse)) + dlse;
  const float of_label = dloss * (1.f - label_smoothing);
  const float of_all = dloss * (label_smoothing / params.length);
  const bool is_zero = ignored && !WITH_DLSE;
  const int64 length = is_zero ? 0 : params.length;  // of such rows nothing is read

  for (int64 batch = 0; batch < Rows::batches(params.length); batch++) {
    float x[Rows::kSegments][Rows::kVec];
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
      load_segment<Rows>(x[segment], row_g, batch * Rows::kSegments + segment, length, 0.f);
    }
#pragma unroll
    for (int segment = 0; segment < Rows::kSegments; segment++) {
      const int64 column = segment_column<Rows>(batch * Rows::kSegments + segment);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) {
        // At most 1: an lse that was rounded to float32 may be below the logit. A NaN stays NaN.
        const float weight = ex2_approx(at_most((x[segment][i] - lse) * kLog2E, 0.f));
        x[segment][i] = is_zero ? 0.f : of_weight * weight - of_all;
      }
      if (!is_zero && column <= label && label < column + Rows::kVec) {
#pragma unroll
        for (int i = 0; i < Rows::kVec; i++) x[segment][i] -= column + i == label ? of_label : 0.f;
      }
      store_segment<Rows, ACCUMULATE>(dlogits_row_g, x[segment], batch * Rows::kSegments + segment, params.length);
    }
  }
}
