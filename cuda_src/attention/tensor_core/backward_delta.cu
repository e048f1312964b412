// Attention backward, before the tensor-core kernels: each row's statistics, and zeros where others add.
//
//   delta_i = sum_d dout_id out_id - dlse_i          (Dao et al., arXiv:2205.14135, appendix B.2; dlse: whoever
//                                                     differentiates through lse as well)
//
// Each CTA also writes the largest size of its rows (gradient_scale.cuh): of dout, or, after those, of V. With bfloat16
// there are neither sizes nor CTAs for rows of V.
//
// Shapes    BackwardParams (backward_params.cuh), which also describes the statistics, or VarlenBackwardParams:
//           packed sequences (sequences.cuh), each found by its warp, 32 at a time; sizes (CTAs, 2).
// Work      ROW_LANES lanes own one row, each 8 columns of it (16 of more than 256); grid B * H * rows_padded /
//           (THREADS / ROW_LANES), at least 1, and after that B * G * keys_padded / (THREADS / ROW_LANES) (packed:
//           without B). The scratch to be zeroed is spread over the grid.
// Budget    a float per warp of shared memory; about 40 registers. Reads out, dout and V once.
// Edges     rows without a key, and rows of the scratch that belong to no sequence, get L = +inf and delta = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(ROW_LANES) || !defined(VEC)
#error "DTYPE, HEAD_DIM_V, THREADS, ROW_LANES and VEC come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../backward_sequences.cuh"
#include "gradient_scale.cuh"
#include "row_statistics.cuh"
#include "tile_loader.cuh"

struct Traits {
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kThreads = THREADS;
  static constexpr int kRowLanes = ROW_LANES;
  static constexpr int kRows = kThreads / kRowLanes;
  static constexpr int kLaneChunks = div_up(kHeadDimV, kRowLanes* kChunkItems);
  static_assert(kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kThreads % kRowLanes == 0 && kRowPad % kRows == 0, "a CTA's rows belong to one head");
};

// The thread's chunks of a row; zeros where it has none.
struct Chunks {
  float items[Traits::kLaneChunks][kChunkItems] = {};

  __device__ __forceinline__ Chunks(const DTYPE* row_g, bool exists) {
#pragma unroll
    for (int i = 0; i < Traits::kLaneChunks; i++) {
      const int chunk = threadIdx.x % Traits::kRowLanes + i * Traits::kRowLanes;
      if (!exists || chunk * kChunkItems >= Traits::kHeadDimV) return;
      const uint4 quad = load_chunk<HEAD_DIM_V, VEC>(row_g + chunk * kChunkItems, chunk);
      load_vec(items[i], reinterpret_cast<const DTYPE*>(&quad));
    }
  }

  // The product of the whole rows, by the lanes that share them.
  __device__ __forceinline__ float product(const Chunks& other) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < Traits::kLaneChunks; i++) {
#pragma unroll
      for (int e = 0; e < kChunkItems; e++) sum = __fmaf_rn(items[i][e], other.items[i][e], sum);
    }
    return warp_reduce<Sum, Traits::kRowLanes>(sum);
  }
};

__device__ __forceinline__ void clear_scratch(float* scratch_g, int64 floats) {
  const int64 step = static_cast<int64>(gridDim.x) * Traits::kThreads, quads = floats / 4;
  const int64 thread = static_cast<int64>(blockIdx.x) * Traits::kThreads + threadIdx.x;
  for (int64 i = thread; i < quads; i += step)
    reinterpret_cast<float4*>(scratch_g)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (thread < floats % 4) scratch_g[quads * 4 + thread] = 0.f;
}

struct Arrays {
  const DTYPE *out_g, *dout_g;
  const float *lse_g, *dlse_g;
  float* statistics_g;
};

// Write those of row `row` of the arrays, if it exists, to row `to_row` of the scratch; by kRowLanes threads.
__device__ __forceinline__ Sizes write_statistics(const BackwardParams& params, const Arrays& arrays, int batch,
                                                  int head, int row, bool exists, uint32 to_row) {
  const AttentionParams& attention = params.attention;
  const Chunks dout(head_rows(arrays.dout_g, params.dout, batch, head, row), exists);
  float sum = Chunks(head_rows(arrays.out_g, attention.out, batch, head, row), exists).product(dout);
  const float square = kNarrowRange<DTYPE> ? dout.product(dout) : 0.f;
  Sizes sizes;
  if (threadIdx.x % Traits::kRowLanes != 0) return sizes;

  float l = kInfinity, delta = 0.f;
  if (exists) {
    const float lse = *head_rows(arrays.lse_g, attention.lse, batch, head, row);
    const float shifted_log2 = __fmaf_rn(lse, kLog2E, -kShiftedLog2);
    if (shifted_log2 != -kInfinity) {  // nor one of float32's lowest, with which a bias may hide every key
      if (arrays.dlse_g != nullptr) sum -= *head_rows(arrays.dlse_g, params.dlse, batch, head, row);
      l = shifted_log2;
      delta = sum * kUnshifted;
      sizes.take_square(square);
      sizes.take_delta(fabsf(sum));
    }
  }
  float* row_g = arrays.statistics_g + statistics_offset(to_row);
  row_g[0] = l;
  row_g[2] = delta;
  return sizes;
}

// The sizes of a key's row of V, if it is in use.
__device__ __forceinline__ Sizes value_sizes(const DTYPE* row_g, bool in_use) {
  const Chunks v(row_g, in_use);
  Sizes sizes;
  sizes.take_square(v.product(v));
  return sizes;
}

// The largest of the CTA's rows.
__device__ __forceinline__ void write_sizes(float* sizes_g, const Sizes& sizes) {
  constexpr int kWarps = Traits::kThreads / kWarpSize;
  __shared__ float2 warps_s[kWarps];
  const auto of_rows = [](float x) {  // of the first lanes of each row
#pragma unroll
    for (int lanes = Traits::kRowLanes; lanes < kWarpSize; lanes *= 2) {
      x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, lanes));
    }
    return x;
  };
  const float square = of_rows(sizes.square), delta = of_rows(sizes.delta);
  if (lane_index() == 0) warps_s[warp_index()] = make_float2(square, delta);
  __syncthreads();  // warps: written
  if (warp_index() != 0) return;
  const float2 of_warp = warps_s[lane_index() % kWarps];
  const float2 of_all = make_float2(warp_reduce<Max, kWarps>(of_warp.x), warp_reduce<Max, kWarps>(of_warp.y));
  if (lane_index() == 0) reinterpret_cast<float2*>(sizes_g)[blockIdx.x] = of_all;
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    ENTRY(attention_backward_delta)(const DTYPE* out_g, const DTYPE* dout_g, const float* lse_g, const float* dlse_g,
                                    const DTYPE* v_g, float* statistics_g, float* sizes_g,
                                    float* zeroed_g PACKED_ARRAYS, const void* seqused_k_g,
                                    const GradientParams params) {
  const BackwardParams& backward = backward_of(params);
  clear_scratch(zeroed_g, backward.zeroed);

  const SequencePointers pointers = {CU_SEQLENS_Q, CU_SEQLENS_K, nullptr, seqused_k_g};
  const int64 flat = static_cast<int64>(blockIdx.x) * Traits::kRows + threadIdx.x / Traits::kRowLanes;
  const int64 rows = scratch_rows(backward);
  Sizes sizes;
  if (flat < rows) {
    const int at = flat % backward.rows_padded;
    const ScratchRows own(params, pointers, flat / backward.rows_padded, at);
    sizes = write_statistics(backward, {out_g, dout_g, lse_g, dlse_g, statistics_g}, own.batch, own.head,
                             own.rows.begin + own.row, 0 <= own.row && own.row < own.rows.count, own.scratch);
  } else if constexpr (kNarrowRange<DTYPE>) {
    const ValueRow own(params, pointers, flat - rows);
    sizes = value_sizes(head_rows(v_g, backward.attention.v, own.batch, own.kv_head, own.row), own.in_use);
  }
  if constexpr (kNarrowRange<DTYPE>) write_sizes(sizes_g, sizes);
}
