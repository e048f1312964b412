// Attention forward, the textbook way: the first step of the tour naive -> tiled -> flash.
//
//   s_j = softmax_scale * q . k_j,   lse = log sum_j exp(s_j),   out = sum_j exp(s_j - lse) v_j
//
// (Vaswani et al., "Attention is all you need", arXiv:1706.03762, equation 1), with each row's softmax done as written:
// first its maximum, then the sum of its exponentials, so every score is computed twice and nothing of size Sq x Sk is
// stored. Keys and values are read again by every row: that is what tiles are for.
//
// Shapes    AttentionParams (params.cuh). float16, bfloat16 or float32 in, float32 inside, one rounding at the store.
// Work      one CTA (cooperative thread array, a block) of THREADS threads owns one query row: grid B * H * Sq. In a
//           strip of THREADS keys each thread owns one score; then it owns the output columns threadIdx.x, threadIdx.x
//           + THREADS, ...
// Budget    shared memory (HEAD_DIM + THREADS + one per warp) floats; about 40 registers.
// Edges     the last strip by predicate; a row without keys gives out = 0 and lse = -inf; lse may be null.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/online_softmax.cuh"
#include "../../common/reduce.cuh"
#include "../params.cuh"

struct Traits {
  using Scalar = DTYPE;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kThreads = THREADS;
  static constexpr int kStrip = kThreads;                          // keys at a time: one score per thread
  static constexpr int kOutColumns = div_up(kHeadDimV, kThreads);  // output columns per thread
  static_assert(kHeadDim >= 1 && kHeadDim <= 256 && kHeadDimV >= 1 && kHeadDimV <= 256, "head dims are 1 to 256");
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps");
};

struct Smem {
  float q[Traits::kHeadDim];  // the query row
  float p[Traits::kStrip];    // the strip's probabilities, before normalisation
  float partial[Traits::kThreads / kWarpSize];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

__device__ __forceinline__ float score_log2(const float* q_s, const Traits::Scalar* k_row_g, float scale_log2) {
  float s = 0.f;
#pragma unroll 8
  for (int d = 0; d < Traits::kHeadDim; d++) s += q_s[d] * to_float(k_row_g[d]);
  return s * scale_log2;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_naive(const Traits::Scalar* q_g, const Traits::Scalar* k_g, const Traits::Scalar* v_g,
                    Traits::Scalar* out_g, float* lse_g, const void* q_offsets_g, const void* seqused_k_g,
                    const AttentionParams params) {
  __shared__ Smem smem;
  const int thread = threadIdx.x;

  // Phase 1: the row, and the keys that it sees.
  const Place place = place_of_cta(params, 1);
  const KeyWindow window = sequence_window(params, q_offsets_g, seqused_k_g, place.batch);
  const KeyRange visible = window.of_row(place.first_row);
  const Traits::Scalar* q_row_g = head_rows(q_g, params.q, place.batch, place.head, place.first_row);
  const Traits::Scalar* k_rows_g = head_rows(k_g, params.k, place.batch, place.kv_head, 0);
  const Traits::Scalar* v_rows_g = head_rows(v_g, params.v, place.batch, place.kv_head, 0);
  for (int d = thread; d < Traits::kHeadDim; d += Traits::kThreads) {
    smem.q[d] = to_float(q_row_g[d]);
  }
  __syncthreads();  // q: written by all, read by all from here on

  // Phase 2: the row's maximum.
  float max_log2 = -kInfinity;
  for (int key = visible.begin + thread; key < visible.end; key += Traits::kStrip) {
    max_log2 = fmaxf(max_log2, score_log2(smem.q, k_rows_g + key * params.k.seq, params.scale_log2));
  }
  OnlineSoftmax<Unit::kLog2> softmax;  // told the maximum at once, it never has to rescale
  softmax.raise(cta_reduce<Max, Traits::kThreads>(max_log2, smem.partial));

  // Phase 3: exponentials, their sum, and the weighted sum of the values, one strip of keys after the other.
  float acc[Traits::kOutColumns] = {};
  for (int first = visible.begin; first < visible.end; first += Traits::kStrip) {
    const int key = first + thread;
    const bool exists = key < visible.end;
    const float p = exists ? softmax.weight(score_log2(smem.q, k_rows_g + key * params.k.seq, params.scale_log2)) : 0.f;
    softmax.l += p;
    __syncthreads();  // p: the previous strip has been read
    smem.p[thread] = p;
    __syncthreads();  // p: this strip has been written

    const int strip = min(Traits::kStrip, visible.end - first);
#pragma unroll
    for (int c = 0; c < Traits::kOutColumns; c++) {
      const int col = thread + c * Traits::kThreads;
      if (col < Traits::kHeadDimV) {
        for (int j = 0; j < strip; j++) {
          acc[c] += smem.p[j] * to_float(v_rows_g[(first + j) * params.v.seq + col]);
        }
      }
    }
  }
  softmax.l = cta_reduce<Sum, Traits::kThreads>(softmax.l, smem.partial);

  // Phase 4: normalise and store.
  Traits::Scalar* out_row_g = head_rows(out_g, params.out, place.batch, place.head, place.first_row);
#pragma unroll
  for (int c = 0; c < Traits::kOutColumns; c++) {
    const int col = thread + c * Traits::kThreads;
    if (col < Traits::kHeadDimV) out_row_g[col] = from_float<Traits::Scalar>(acc[c] * softmax.normaliser());
  }
  if (lse_g != nullptr && thread == 0) {
    *head_rows(lse_g, params.lse, place.batch, place.head, place.first_row) = softmax.lse();
  }
}
