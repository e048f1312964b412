// The statistics of a row for the tensor-core backward, wherever it lies: backward_delta.cu says what they are.
#pragma once

#if !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(ROW_LANES) || !defined(VEC)
#error "HEAD_DIM_V, THREADS, ROW_LANES and VEC come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "row_statistics.cuh"
#include "tile_feed.cuh"

struct Traits {
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kThreads = THREADS;
  static constexpr int kRowLanes = ROW_LANES;
  static constexpr int kRows = kThreads / kRowLanes;
  static_assert(kHeadDimV >= 1 && kHeadDimV <= kRowLanes * kChunkItems, "a lane owns one chunk");
  static_assert(kThreads % kRowLanes == 0 && kRowPad % kRows == 0, "a CTA's rows belong to one head");
};

// One chunk's part of a row's sum of products.
__device__ __forceinline__ float chunk_product(const float16* out_g, const float16* dout_g, int chunk) {
  const uint4 out = load_chunk<HEAD_DIM_V, VEC>(out_g, chunk), dout = load_chunk<HEAD_DIM_V, VEC>(dout_g, chunk);
  float a[kChunkItems], b[kChunkItems], sum = 0.f;
  load_vec(a, reinterpret_cast<const float16*>(&out));
  load_vec(b, reinterpret_cast<const float16*>(&dout));
#pragma unroll
  for (int e = 0; e < kChunkItems; e++) sum = __fmaf_rn(a[e], b[e], sum);
  return sum;
}

__device__ __forceinline__ void clear_scratch(float* scratch_g, int64 floats) {
  const int64 step = static_cast<int64>(gridDim.x) * Traits::kThreads, quads = floats / 4;
  const int64 thread = static_cast<int64>(blockIdx.x) * Traits::kThreads + threadIdx.x;
  for (int64 i = thread; i < quads; i += step)
    reinterpret_cast<float4*>(scratch_g)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (thread < floats % 4) scratch_g[quads * 4 + thread] = 0.f;
}

struct Arrays {
  const float16 *out_g, *dout_g;
  const float *lse_g, *dlse_g;
  float* statistics_g;
};

// Of row `row` of the arrays, if it exists, to row `to_row` of the scratch; by kRowLanes threads.
__device__ __forceinline__ void write_statistics(const BackwardParams& params, const Arrays& arrays, int batch,
                                                 int head, int row, bool exists, uint32 to_row) {
  const AttentionParams& attention = params.attention;
  const int chunk = threadIdx.x % Traits::kRowLanes;
  float sum = 0.f;
  if (exists && chunk * kChunkItems < Traits::kHeadDimV) {
    sum = chunk_product(head_rows(arrays.out_g, attention.out, batch, head, row) + chunk * kChunkItems,
                        head_rows(arrays.dout_g, params.dout, batch, head, row) + chunk * kChunkItems, chunk);
  }
  sum = warp_reduce<Sum, Traits::kRowLanes>(sum);
  if (chunk != 0) return;

  float l = kInfinity, delta = 0.f;
  if (exists) {
    const float lse = *head_rows(arrays.lse_g, attention.lse, batch, head, row);
    const float shifted_log2 = __fmaf_rn(lse, kLog2E, -kShiftedLog2);
    if (shifted_log2 != -kInfinity) {  // nor one of float32's lowest, with which a bias may hide every key
      if (arrays.dlse_g != nullptr) sum -= *head_rows(arrays.dlse_g, params.dlse, batch, head, row);
      l = shifted_log2;
      delta = sum * kUnshifted;
    }
  }
  float* row_g = arrays.statistics_g + statistics_offset(to_row);
  row_g[0] = l;
  row_g[2] = delta;
}
