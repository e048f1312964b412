// dz, the gradient of linear's preactivation z = x w + b, and partial sums of it over rows, which become db.
//
//   out = f(z):           dz = dout f'(z)
//   out = f(gate) up:     dgate = dout up f'(gate),   dup = dout f(gate)        (z = gate and up)
//
// It is computed once, for dx = dz w^T and for dw = x^T dz. If the products computed it while they load their operands,
// every tile would compute it again, on Turing's slowest pipe: by the static model, tensor cores would then be busy for
// 0.65 of both products instead of 0.93. From K = 800 on that costs more than this pass, whose reads db needs anyway.
//
// Shapes    dout (rows, columns), z (rows, columns), with PAIRED (rows, 2 columns), rows of both contiguous; dz like z,
//           contiguous; partials (row blocks, columns or 2 columns). Null: dz without an activation (then it is dout),
//           partials without a bias.
// Work      a thread owns VEC columns, a CTA (cooperative thread array, a block of threads) 32 of these and block_rows
//           rows, of which every warp takes each THREADS / 32-th. Grid ceil(columns / (32 VEC)) * row blocks.
// Budget    a float of shared memory for each warp and column, and some between; VEC sums of each half in registers.
// Edges     columns and rows beyond the arrays are not read.
#if !defined(DTYPE) || !defined(ACTIVATION) || !defined(PAIRED) || !defined(VEC) || !defined(THREADS) || \
    !defined(SHARED_BYTES)
#error "DTYPE, ACTIVATION, PAIRED, VEC, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/vec.cuh"
#include "../../common/activations.cuh"

// Field for field PREACTIVATION_GRADIENT_PARAMS of cupyattn/ops/linear/kernels_tensor_core.py. Strides are in items.
struct PreactivationGradientParams {
  int64 dout_stride, preactivation_stride;
  int rows, columns;  // of a half
  int block_rows, column_blocks;
};
static_assert(sizeof(PreactivationGradientParams) == PREACTIVATION_GRADIENT_PARAMS_BYTES,
              "the struct and its NumPy twin are one layout");

constexpr int kHalves = PAIRED ? 2 : 1;
constexpr int kWarps = THREADS / kWarpSize;
static_assert(THREADS % kWarpSize == 0 && (VEC == 1 || VEC * sizeof(DTYPE) == kVectorBytes), "whole warps, vectors");

// Row i has sum i of each lane's VEC sums. The distance of rows is such that lanes that write a row, and lanes that
// read neighbouring columns, access every bank once.
constexpr int kSumStride = VEC == 1 ? kWarpSize : kWarpSize + kWarpSize / VEC;

struct Smem {
  float sums[kWarps][kHalves][VEC][kSumStride];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// The columns that this thread owns in a row: those of the gate, then those of up.
__device__ __forceinline__ void form_gradient(float (&dz)[kHalves][VEC], const DTYPE* dout_g, const DTYPE* z_g,
                                              int columns) {
  float dout[VEC], z[VEC] = {}, up[VEC];
  load_vec(dout, dout_g);
  if constexpr (!kIsIdentity<ACTIVATION>) load_vec(z, z_g);
  if constexpr (PAIRED) load_vec(up, z_g + columns);
#pragma unroll
  for (int i = 0; i < VEC; i++) {
    dz[0][i] = dout[i] * ACTIVATION::derivative(z[i]);
    if constexpr (PAIRED) {
      dz[0][i] *= up[i];
      dz[kHalves - 1][i] = dout[i] * ACTIVATION::value(z[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_preactivation_gradient(const DTYPE* dout_g, const DTYPE* preactivation_g, DTYPE* dz_g, float* partials_g,
                                  const PreactivationGradientParams params) {
  __shared__ Smem smem_s;
  const int block = blockIdx.x / params.column_blocks, column_block = blockIdx.x - block * params.column_blocks;
  const int column = (column_block * kWarpSize + lane_index()) * VEC;
  const bool exists = column < params.columns;
  const int64 width = static_cast<int64>(params.columns) * kHalves;

  // Phase 1: the rows of this warp.
  float sums[kHalves][VEC] = {};
  const int first_row = block * params.block_rows, end = min(first_row + params.block_rows, params.rows);
  for (int row = first_row + warp_index(); exists && row < end; row += kWarps) {
    float dz[kHalves][VEC];
    form_gradient(dz, dout_g + row * params.dout_stride + column,
                  preactivation_g + row * params.preactivation_stride + column, params.columns);
#pragma unroll
    for (int half = 0; half < kHalves; half++) {
      if (dz_g != nullptr) store_vec(dz_g + row * width + half * params.columns + column, dz[half]);
#pragma unroll
      for (int i = 0; i < VEC; i++) sums[half][i] += dz[half][i];
    }
  }
  if (partials_g == nullptr) return;

  // Phase 2: the sums of all warps, one column a thread at a time.
#pragma unroll
  for (int half = 0; half < kHalves; half++) {
#pragma unroll
    for (int i = 0; i < VEC; i++) smem_s.sums[warp_index()][half][i][lane_index()] = sums[half][i];
  }
  __syncthreads();  // smem_s.sums: written by every warp
  for (int at = threadIdx.x; at < kHalves * kWarpSize * VEC; at += THREADS) {
    const int half = at / (kWarpSize * VEC), own = at % (kWarpSize * VEC);
    const int to = column_block * (kWarpSize * VEC) + own;
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) total += smem_s.sums[warp][half][own % VEC][own / VEC];
    if (to < params.columns) partials_g[block * width + half * params.columns + to] = total;
  }
}
