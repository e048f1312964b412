// Attention backward, between the rows' statistics and the tensor-core kernels of products: by how much dS is made
// smaller (gradient_scale.cuh), and delta with it.
//
// Shapes    BackwardParams (backward_params.cuh), or VarlenBackwardParams: packed sequences (sequences.cuh); sizes as
//           backward_delta.cu leaves them, scales (B, H, 2).
// Work      one CTA of THREADS threads owns one key-value head of a sequence: grid B * G. It reads 8 bytes for every
//           CTA_ROWS rows of dout and of V, and the statistics of its rows only where k is not 0.
// Budget    one float per warp of shared memory; about 30 registers.
// Edges     without queries or keys the scale is 1.
#if !defined(DTYPE) || !defined(CTA_ROWS) || !defined(THREADS)
#error "DTYPE, CTA_ROWS and THREADS come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../backward_sequences.cuh"
#include "gradient_scale.cuh"
#include "row_statistics.cuh"

struct Traits {
  static constexpr int kRows = CTA_ROWS;  // of a CTA of backward_delta
  static constexpr int kThreads = THREADS;
  static_assert(kRowPad % kRows == 0, "a CTA's rows belong to one head");
};

struct Scratch {
  const float* sizes_g;
  float *statistics_g, *scales_g;
};

// The largest sizes of `count` rows of each of `heads` heads, which lie `head_rows` apart from row `first` of the first
// kernel's grid on.
__device__ __forceinline__ Sizes largest(const float* sizes_g, int64 first, int count, int heads, int64 head_rows) {
  const int ctas = div_up(count, Traits::kRows);
  Sizes sizes;
  for (int at = threadIdx.x; at < ctas * heads; at += Traits::kThreads) {
    const int64 cta = (first + at / ctas * head_rows) / Traits::kRows + at % ctas;
    const float2 of_cta = reinterpret_cast<const float2*>(sizes_g)[cta];
    sizes.take_square(of_cta.x);
    sizes.take_delta(of_cta.y);
  }
  return sizes;
}

__device__ __forceinline__ GradientScale scale_for(float bound) {
  constexpr int kBits = 23, kBias = 127;  // of a float's mantissa, and of its exponent
  const int log2 = static_cast<int>(__float_as_uint(bound) >> kBits) - (kBias - 1);  // bound < 2^log2
  const int k = clamp(log2 - kMostLog2, 0, kMostDownLog2);
  return {__uint_as_float((kBias - k) << kBits), __uint_as_float((kBias + k) << kBits)};
}

// Write the scale of a sequence whose queries lie from `first_row` of a head in scratch on; `value_row` is the first
// one of its keys in the first kernel's grid.
__device__ __forceinline__ void write_scale(const BackwardParams& params, const Scratch& scratch, int batch,
                                            int kv_head, uint32 first_row, int queries, int64 value_row, int keys) {
  __shared__ float partial_s[Traits::kThreads / kWarpSize];
  const AttentionParams& attention = params.attention;
  const Sizes rows = largest(scratch.sizes_g, first_row, queries, attention.group, params.rows_padded);
  const Sizes values = largest(scratch.sizes_g, value_row, keys, 1, 0);
  const float dout_square = cta_reduce<Max, Traits::kThreads>(rows.square, partial_s);
  const float delta = cta_reduce<Max, Traits::kThreads>(rows.delta, partial_s);
  const float v_square = cta_reduce<Max, Traits::kThreads>(values.square, partial_s);
  const GradientScale scale = scale_for(__fmaf_rn(sqrtf(dout_square * v_square), attention.scores.keep_scale, delta));

  auto* scales_g = reinterpret_cast<float2*>(scratch.scales_g) + batch * attention.heads + kv_head * attention.group;
  for (int head = threadIdx.x; head < attention.group; head += Traits::kThreads) {
    scales_g[head] = make_float2(scale.down, scale.up);
  }
  if (scale.down == 1.f) return;
  const int pairs = div_up(queries, 2);
  for (int head = 0; head < attention.group; head++) {
    auto* pairs_g =
        reinterpret_cast<float4*>(scratch.statistics_g + statistics_offset(first_row + head * params.rows_padded));
    for (int pair = threadIdx.x; pair < pairs; pair += Traits::kThreads) {
      pairs_g[pair].z *= scale.down;  // L, L', delta, delta'
      pairs_g[pair].w *= scale.down;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Traits::kThreads)
    ENTRY(attention_backward_scales)(const float* sizes_g, float* statistics_g, float* scales_g PACKED_ARRAYS,
                                     const GradientParams params) {
  const BackwardParams& backward = backward_of(params);
  const Sequences sequences(params, {CU_SEQLENS_Q, CU_SEQLENS_K});
  const AttentionParams& attention = sequences.attention;
  const int kv_heads = attention.heads / attention.group;
  const int batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const RowSpan queries = sequences.queries(batch), keys = sequences.keys(batch);
  const ScratchBatch scratch(queries, batch);
  write_scale(backward, {sizes_g, statistics_g, scales_g}, batch, kv_head,
              scratch_row(backward, scratch.batch, kv_head * attention.group, scratch.begin), queries.count,
              scratch_rows(backward) + first_value_row(params, keys, batch, kv_head), keys.count);
}
