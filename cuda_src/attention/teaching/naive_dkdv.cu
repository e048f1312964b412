// Attention backward, the textbook way, second step: the gradients of keys and values.
//
//   dv_j = sum_i p_ij dout_i,   dk_j = softmax_scale * sum_i ds_ij q_i
//
// with p and ds of score_gradient.cuh, over the queries of all heads that share key j (Dao et al., arXiv:2205.14135,
// appendix B.2). The owner of a key walks the queries that see it, so nothing is added by two CTAs: no atomics, and
// the same result from run to run.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous,
//           from naive_dq.cu. float16, bfloat16 or float32 in, float32 inside, one rounding at the store.
// Work      one CTA of THREADS threads owns one key, grid B * G * Sk. In a strip of THREADS queries each thread owns
//           one score; then it owns the columns threadIdx.x, threadIdx.x + THREADS, ... of dk and dv.
// Budget    shared memory (HEAD_DIM + HEAD_DIM_V + 2 THREADS) floats.
// Edges     the last strip by predicate; a key that no query sees, or behind seqused_k, gives zeros and is not read.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "naive_gradient.cuh"

struct Traits : NaiveTraits {
  static constexpr int kStrip = kThreads;  // queries at a time: one score per thread
};

struct Smem {
  float k[Traits::kHeadDim];
  float v[Traits::kHeadDimV];
  float p[Traits::kStrip], ds[Traits::kStrip];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

// A thread's columns of a sum over queries of a weight times a row.
template <int kDim>
struct ColumnSums {
  static constexpr int kColumns = div_up(kDim, Traits::kThreads);
  float acc[kColumns] = {};

  __device__ __forceinline__ void add_strip(const float* weights_s, const Traits::Scalar* rows_g, int64 row_stride,
                                            int rows) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int col = threadIdx.x + c * Traits::kThreads;
      if (col < kDim) {
        for (int i = 0; i < rows; i++) acc[c] += weights_s[i] * to_float(rows_g[i * row_stride + col]);
      }
    }
  }

  __device__ __forceinline__ void store(Traits::Scalar* row_g, float factor, const BackwardParams& params) const {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const int col = threadIdx.x + c * Traits::kThreads;
      if (col < kDim) store_gradient(row_g + col, factor * acc[c], params);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_naive_dkdv(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                  const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                                  const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                  const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, Traits::Scalar* dk_g,
                                  Traits::Scalar* dv_g, const BackwardParams params MODIFIER_STRIDES) {
  __shared__ Smem smem;
  const AttentionParams& forward = params.attention;
  const int thread = threadIdx.x;

  // Phase 1: the key, and the rows that see it.
  // Any order would do. With KeyPlace's, which knows of batch elements that take turns, head dim 256 spilled 56 bytes
  // (sm_75, NVRTC 12.9.86, 2026-11-26).
  const int kv_heads = forward.heads / forward.group;
  const Turn turn(blockIdx.x, forward.sk, forward.kv_together);
  const int key = turn.tile, kv_head = turn.head % kv_heads, batch = turn.head / kv_heads;
  const int64 q_offset = query_offset(forward, q_offsets_g, batch);
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, batch);
  const KeyRange seeing = window.rows_of(key, forward.sq);
  if (key < window.keys) {
    const Traits::Scalar* k_row_g = head_rows(k_g, forward.k, batch, kv_head, key);
    const Traits::Scalar* v_row_g = head_rows(v_g, forward.v, batch, kv_head, key);
    for (int d = thread; d < Traits::kHeadDim; d += Traits::kThreads) smem.k[d] = to_float(k_row_g[d]);
    for (int d = thread; d < Traits::kHeadDimV; d += Traits::kThreads) smem.v[d] = to_float(v_row_g[d]);
  }
  __syncthreads();  // k and v: written by all, read by all from here on

  // Phase 2: p and ds, and their products with the rows, head by head, one strip of queries after the other.
  ColumnSums<Traits::kHeadDim> dk;
  ColumnSums<Traits::kHeadDimV> dv;
  for (int head = kv_head * forward.group; head < (kv_head + 1) * forward.group; head++) {
    const Traits::Pass pass(forward, bias_g, mask_g, slopes_g, Place{batch, head, kv_head, 0, forward.sq, forward.sk},
                            q_offset, MODIFIERS);
    const Traits::Scalar* q_rows_g = head_rows(q_g, forward.q, batch, head, 0);
    const Traits::Scalar* dout_rows_g = head_rows(dout_g, params.dout, batch, head, 0);
    for (int first = seeing.begin; first < seeing.end; first += Traits::kStrip) {
      const int row = first + thread;
      ScoreGradient score = {};
      if (row < seeing.end) {
        const RowSums sums(*head_rows(lse_g, forward.lse, batch, head, row),
                           delta_rows(delta_g, forward, batch, head)[row]);
        const float product = dot<Traits::kHeadDim>(smem.k, q_rows_g + row * forward.q.seq);
        const float dp = dot<Traits::kHeadDimV>(smem.v, dout_rows_g + row * params.dout.seq);
        score = score_gradient(pass, sums, row, key, product, dp);
      }
      __syncthreads();  // p and ds: the previous strip has been read
      smem.p[thread] = score.p;
      smem.ds[thread] = score.dproduct;
      __syncthreads();  // p and ds: this strip has been written

      const int strip = min(Traits::kStrip, seeing.end - first);
      dk.add_strip(smem.ds, q_rows_g + first * forward.q.seq, forward.q.seq, strip);
      dv.add_strip(smem.p, dout_rows_g + first * params.dout.seq, params.dout.seq, strip);
    }
  }

  // Phase 3: scale and store.
  dk.store(head_rows(dk_g, params.dk, batch, kv_head, key), params.scale, params);
  dv.store(head_rows(dv_g, params.dv, batch, kv_head, key), 1.f, params);
}
