// Reduces the losses of rows to one loss, or the gradient of that loss to the gradient of each row's loss.
//
//   result = numerator / count,   numerator = sum over rows of losses, or dloss if there are no losses,
//                                 count = with MEAN the number of labels that are not ignored, otherwise 1
//
// Shapes    losses (rows,) float32, contiguous; dloss and result one float32; labels one a row of any strides
//           (RowsParams, rows.cuh), length 1.
// Work      one CTA; a thread adds every THREADS-th row, then the threads' sums are added, in a fixed order.
// Budget    one float per warp of shared memory.
// Edges     if every label is ignored, 0 / 0 gives NaN.
#if !defined(THREADS) || !defined(LABELS_DTYPE) || !defined(MEAN)
#error "THREADS, LABELS_DTYPE and MEAN come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

using Params = RowsParams<1>;
enum Array { kLabels };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

extern "C" __global__ void __launch_bounds__(THREADS)
    loss_reduction(const float* losses_g, const float* dloss_g, const LABELS_DTYPE* labels_g, float* result_g,
                   int64 ignore_index, const Params params) {
  __shared__ float partial_s[THREADS / kWarpSize];
  float sum = 0.f;
  int counted = 0;
  for (int64 row = threadIdx.x; row < params.rows; row += THREADS) {
    if (!dloss_g) sum += losses_g[row];
    if (MEAN) counted += labels_g[row_offset(params, kLabels, row)] != ignore_index;
  }
  sum = cta_reduce<Sum, THREADS>(sum, partial_s);
  // Two halves, each exact in float32, because counts exceed 2^24.
  const float low = cta_reduce<Sum, THREADS>(static_cast<float>(counted & 0xfff), partial_s);
  const float high = cta_reduce<Sum, THREADS>(static_cast<float>(counted >> 12), partial_s);
  if (threadIdx.x != 0) return;
  const float numerator = dloss_g ? *dloss_g : sum;  // losses of no rows have no address
  *result_g = MEAN ? numerator / (high * 4096.f + low) : numerator;
}
