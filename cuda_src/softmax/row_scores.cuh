// A row of scores of the softmax kernels: the items of x with their options applied.
//
//   s_j = scale x_j + bias_j where column j is kept, and -inf otherwise.
//
// Column j is kept if the mask is true, and with CAUSAL if j <= i + length - queries, where i is the row's index along
// the axis before the last, whose extent is `queries`. Mask and bias broadcast to the rows.
#pragma once

#if !defined(CAUSAL) || !defined(WITH_MASK) || !defined(MASK_DTYPE) || !defined(MASK_WHOLE) || !defined(WITH_BIAS) || \
    !defined(BIAS_DTYPE) || !defined(BIAS_WHOLE)
#error \
    "CAUSAL, WITH_MASK, MASK_DTYPE, MASK_WHOLE, WITH_BIAS, BIAS_DTYPE, BIAS_WHOLE come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

// The arrays and options of a call apart from x.
struct ScoreOptions {
  const MASK_DTYPE* mask_g;
  const BIAS_DTYPE* bias_g;
  int64 mask_stride, bias_stride;  // from one column to the next, in items
  float scale;
  int64 queries;
};

// The indices of x, mask and bias in RowsParams.
template <typename Rows, typename Scalar, int kX, int kMask, int kBias>
class ScoreRow {
 public:
  // A row that does not exist has no columns.
  template <typename Params>
  __device__ __forceinline__ ScoreRow(const Scalar* x_g, const ScoreOptions& options, const Params& params, int64 row,
                                      bool exists)
      : options_(options), visible_(exists ? params.length : 0) {
    const int64 place = exists ? row : 0;
    x_row_g_ = x_g + row_offset(params, kX, place);
    if (WITH_MASK) options_.mask_g += row_offset(params, kMask, place);
    if (WITH_BIAS) options_.bias_g += row_offset(params, kBias, place);
    if (CAUSAL && exists) {
      const int64 seen = row % options.queries + params.length - options.queries + 1;
      visible_ = min(max(seen, int64(0)), params.length);
    }
  }

  // Columns from here on are -inf and need not be read.
  __device__ __forceinline__ int64 visible() const { return visible_; }

  // The scores of a row segment; columns that are hidden or beyond the row are -inf.
  __device__ __forceinline__ void load(float (&s)[Rows::kVec], int64 segment) const {
    float bias[Rows::kVec], mask[Rows::kVec];
    load_segment<Rows>(s, x_row_g_, segment, visible_, 0.f);
    if (WITH_BIAS) load_broadcast<Rows, BIAS_WHOLE>(bias, options_.bias_g, options_.bias_stride, segment, visible_);
    if (WITH_MASK) load_broadcast<Rows, MASK_WHOLE>(mask, options_.mask_g, options_.mask_stride, segment, visible_);
    const int columns = static_cast<int>(min(visible_ - segment_column<Rows>(segment), int64(Rows::kVec)));
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) {
      const bool inside = (CAUSAL ? i : 0) < columns;  // a row of whole vectors ends between two of them
      const bool kept = inside && (!WITH_MASK || mask[i] != 0.f);
      s[i] = kept ? fmaf(options_.scale, s[i], WITH_BIAS ? bias[i] : 0.f) : -kInfinity;
    }
  }

 private:
  const Scalar* x_row_g_;
  ScoreOptions options_;
  int64 visible_;
};
