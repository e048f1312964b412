// The gradient of a bias of softmax, or of its logarithm, first step: partial sums of the gradient of the scores, over
// the axes along which the bias was broadcast. column_sums.cu adds the partial sums.
//
//   partials[split][k][c] = sum over the rows r of the split of ds[k][r][c]
//
// ds is computed again from dout, the forward's result y and the row sums that backward.cu wrote (gradient.cuh): its
// terms are float32, and no array holds them.
//
// Shapes    dout and y of any rank and any outer strides, last axis contiguous: K * R rows of C columns; row_sum one
//           float32 a row. `kept` has the axes of k, `summed` those of r (RowsParams, rows.cuh). partials
//           (splits, K, C), contiguous.
// Work      a CTA owns 32 vectors of columns of one k, and one split: its warps add rows in turn, a lane one vector;
//           then its threads add the warps' sums. Grid K * ceil(C / (32 VEC)) * splits. The order is fixed.
// Budget    shared memory: a float for each warp and column; registers: the vectors of kAhead rows a thread.
// Edges     columns beyond the last are neither read nor written; a split without rows writes zeros.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(LOGARITHM) || !defined(SHARED_BYTES)
#error "DTYPE, THREADS, VEC, LOGARITHM and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../common/rows.cuh"
#include "gradient.cuh"

using Scalar = DTYPE;
using Params = RowsParams<3>;
enum Array { kDout, kY, kRowSum, kArrays };
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kColumns = kWarpSize * VEC;            // of a CTA
constexpr int kPitch = kWarpSize + kWarpSize / VEC;  // of item i of all lanes: whoever reads neighbouring columns finds
                                                     // them in different banks
static_assert(THREADS % kWarpSize == 0, "whole warps");
constexpr int kAhead = 4;  // rows whose loads are under way before the first of them is used

struct Smem {
  float sum[kWarps][VEC * kPitch];  // item i of a lane at i * kPitch + lane
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_dbias(const Scalar* dout_g, const Scalar* y_g, const float* row_sum_g, float* partials_g, int64 splits,
                  const Params kept, const Params summed) {
  __shared__ Smem smem_s;
  const int64 blocks = (kept.length + kColumns - 1) / kColumns;
  const int64 first_column = blockIdx.x % blocks * kColumns, split = blockIdx.x / blocks % splits;
  const int64 k = blockIdx.x / blocks / splits;

  // Phase 1: each warp adds its rows.
  const int64 column = first_column + lane_index() * VEC;
  int64 of_k[kArrays];
  row_offsets(of_k, kept, k);
  float sum[VEC] = {};
  if (column < kept.length) {
    const int64 step = splits * kWarps;
    for (int64 first = split * kWarps + warp_index(); first < summed.rows; first += kAhead * step) {
      int64 of_r[kAhead][kArrays];
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ahead++) {
        const int64 r = first + ahead * step;
        row_offsets(of_r[ahead], summed, r < summed.rows ? r : first);
      }
      float dout[kAhead][VEC], y[kAhead][VEC], row_sum[kAhead];
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ahead++) {
        load_vec(dout[ahead], dout_g + of_k[kDout] + of_r[ahead][kDout] + column);
        load_vec(y[ahead], y_g + of_k[kY] + of_r[ahead][kY] + column);
        row_sum[ahead] = row_sum_g[of_k[kRowSum] + of_r[ahead][kRowSum]];
      }
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ahead++) {
        const bool exists = first + ahead * step < summed.rows;  // otherwise the first one was loaded again
#pragma unroll
        for (int i = 0; i < VEC; i++) {
          const float ds = softmax_gradient<LOGARITHM>(dout[ahead][i], y[ahead][i], row_sum[ahead]);
          sum[i] += exists ? ds : 0.f;
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < VEC; i++) smem_s.sum[warp_index()][i * kPitch + lane_index()] = sum[i];
  __syncthreads();  // smem_s.sum: written by every warp

  // Phase 2: the warps' sums, a thread for each column.
  const int64 rows = gridDim.x / (blocks * splits);
  for (int at = threadIdx.x; at < kColumns && first_column + at < kept.length; at += THREADS) {
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) total += smem_s.sum[warp][at % VEC * kPitch + at / VEC];
    partials_g[(split * rows + k) * kept.length + first_column + at] = total;
  }
}
