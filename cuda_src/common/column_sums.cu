// Sums over rows, second step: add the partial sums of the CTAs of a row kernel (rows.cuh), in a fixed order.
//
//   sums_c = sum over p of partials_pc   (+ the old sums_c, with accumulate)
//
// Shapes    partials and more_partials (count, length) float32, contiguous; sums and more_sums (length,) of DTYPE,
//           contiguous. more_partials and more_sums are for a second result in the same launch, and may be absent.
// Work      a CTA (cooperative thread array, CUDA's thread block) owns 32 columns of one result, one per lane. Each of
//           its W = THREADS / 32 warps adds every W-th partial sum; then the first warp adds the warps' sums. Grid
//           ceil(length / 32) for each result.
// Budget    one float per thread of shared memory; about 30 registers.
// Edges     columns beyond the length are not read; without partial sums the result is 0.
#if !defined(DTYPE) || !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "numeric.cuh"

constexpr int kWarps = THREADS / kWarpSize;
static_assert(THREADS % kWarpSize == 0, "whole warps");

struct Smem {
  float sum[kWarps][kWarpSize];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

extern "C" __global__ void __launch_bounds__(THREADS)
    column_sums(const float* partials_g, const float* more_partials_g, DTYPE* sums_g, DTYPE* more_sums_g, int64 count,
                int64 length, int accumulate) {
  __shared__ Smem smem_s;
  const int64 ctas = (length + kWarpSize - 1) / kWarpSize;  // for each result
  if (blockIdx.x >= ctas) partials_g = more_partials_g, sums_g = more_sums_g;
  const int64 column = blockIdx.x % ctas * kWarpSize + lane_index();
  const bool exists = column < length;

  float sum = 0.f;
  if (exists) {
#pragma unroll 8
    for (int64 p = warp_index(); p < count; p += kWarps) sum += partials_g[p * length + column];
  }
  smem_s.sum[warp_index()][lane_index()] = sum;
  __syncthreads();  // smem_s.sum: written by every warp
  if (warp_index() != 0 || !exists) return;

  float total = accumulate ? to_float(sums_g[column]) : 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) total += smem_s.sum[warp][lane_index()];
  sums_g[column] = from_float<DTYPE>(total);
}
