// Sums over the axes along which an array had been broadcast, first step: the gradient of a bias from that of the
// scores. column_sums.cu adds the parts.
//
//   partials[split][k][c] = sum over the rows r of the split of x[k][r][c]
//
// Shapes    x of any rank and any outer strides, last axis contiguous: K * R rows of C columns. `kept` has the axes of
//           k, `summed` those of r (RowsParams of one array each, rows.cuh). partials (splits, K, C), contiguous.
// Work      a CTA owns 32 vectors of columns of one k, and one split: its warps add rows in turn, a lane one vector;
//           then its threads add the warps' sums. Grid K * ceil(C / (32 VEC)) * splits. The order is fixed.
// Budget    shared memory: a float for each warp and column; registers: 8 loads in flight a thread.
// Edges     columns beyond the last are neither read nor written; a split without rows leaves zeros.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(SHARED_BYTES)
#error "DTYPE, THREADS, VEC and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../common/rows.cuh"

using Scalar = DTYPE;
using Params = RowsParams<1>;
static_assert(sizeof(Params) == ROWS_PARAMS_BYTES, "cupyattn/kernels/structs.py describes another struct");

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kColumns = kWarpSize * VEC;            // of a CTA
constexpr int kPitch = kWarpSize + kWarpSize / VEC;  // of item i of all lanes: whoever reads neighbouring columns finds
                                                     // them in different banks
static_assert(THREADS % kWarpSize == 0, "whole warps");

struct Smem {
  float sum[kWarps][VEC * kPitch];  // item i of a lane at i * kPitch + lane
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(THREADS)
    broadcast_sums(const Scalar* x_g, float* partials_g, int64 splits, const Params kept, const Params summed) {
  __shared__ Smem smem_s;
  const int64 blocks = (kept.length + kColumns - 1) / kColumns;
  const int64 first_column = blockIdx.x % blocks * kColumns, split = blockIdx.x / blocks % splits;
  const int64 k = blockIdx.x / blocks / splits;

  // Phase 1: each warp adds its rows.
  const int64 column = first_column + lane_index() * VEC;
  const Scalar* x_k_g = x_g + row_offset(kept, 0, k) + column;
  float sum[VEC] = {};
  if (column < kept.length) {
#pragma unroll 8
    for (int64 r = split * kWarps + warp_index(); r < summed.rows; r += splits * kWarps) {
      float x[VEC];
      load_vec(x, x_k_g + row_offset(summed, 0, r));
#pragma unroll
      for (int i = 0; i < VEC; i++) sum[i] += x[i];
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
