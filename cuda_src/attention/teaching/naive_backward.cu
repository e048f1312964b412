// Attention backward, the textbook way: the gradients of naive.cu's result.
//
//   p_ij = exp(s_ij - lse_i),   dp_ij = dout_i . v_j,   ds_ij = p_ij (dp_ij - delta_i)
//   dq_i = softmax_scale * sum_j ds_ij k_j,   dk_j = softmax_scale * sum_i ds_ij q_i,   dv_j = sum_i p_ij dout_i
//   with s_ij = softmax_scale * q_i . k_j  and  delta_i = dout_i . out_i - dlse_i
//
// (Dao et al., "FlashAttention", arXiv:2205.14135, appendix B.2). lse is an input, so that each score is computed again
// alone, without the other scores of its row. dq sums over keys; dk and dv sum over queries. One CTA owns each sum:
// there are no atomic additions, and the result is the same in every run. The price is that every score is computed
// twice, and every dp too.
//
// Shapes    q, dq (B, Sq, H, D), k, dk (B, Sk, G, D), v, dv (B, Sk, G, Dv), dout, out (B, Sq, H, Dv), lse, dlse
//           (B, H, Sq). The last axis is contiguous, but for lse and dlse; other axes have any stride. Query head h
//           reads key-value head h / (H / G). lse and dlse are float32, the others float16, bfloat16 or float32. The
//           arithmetic is float32, and gradients are rounded once, at the store.
// Tiles     a CTA of the first kind owns one query row and visits the keys that it sees; one of the second kind owns
//           one key and visits the queries of all heads of its group that see it. Both do so in segments of THREADS:
//           each thread owns one score of a segment, and the columns threadIdx.x, threadIdx.x + THREADS, ... of the
//           sums.
// Grid      B * H * Sq CTAs of the first kind, then B * G * Sk of the second, of THREADS threads.
// Budget    shared memory: HEAD_DIM + HEAD_DIM_V + 2 THREADS floats; 64 to 66 registers, 128 at head dim 512.
// Barriers  after the CTA's own rows are written; around each write of a segment's p and ds, which all threads read.
// Edges     the last segment is cut by a predicate. A query without keys, or a key without queries, has zeros. p is at
//           most 1: where lse is so large that its digits end before the point, exp(s - lse) could overflow. dlse_g
//           may be null. With `accumulate` gradients are added to what is there.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include <cuda_fp16.h>
#ifdef BFLOAT16  // only where DTYPE is bfloat16: the header takes as long to compile as this file
#include <cuda_bf16.h>
using bfloat16 = __nv_bfloat16;
#endif
using float16 = __half;
using float32 = float;
using Item = DTYPE;

static_assert(HEAD_DIM >= 1 && HEAD_DIM <= 512 && HEAD_DIM_V >= 1 && HEAD_DIM_V <= 512, "head dims are 1 to 512");
static_assert(THREADS <= 1024, "a CTA has at most 1,024 threads");

struct Strides {
  long long batch, seq, head;  // in items
};

struct TeachingBackwardParams {
  Strides dout, q, k, v, out, lse, dlse, dq, dk, dv;
  int batch, heads, group, sq, sk;  // B, H, H / G, Sq, Sk
  int causal, accumulate;
  float softmax_scale;
};
static_assert(sizeof(TeachingBackwardParams) == TEACHING_BACKWARD_PARAMS_BYTES,
              "its dtype in Python describes another struct");

struct Inputs {
  const Item *dout, *q, *k, *v, *out;
  const float *lse, *dlse;
};

struct Smem {
  float first[HEAD_DIM], second[HEAD_DIM_V];  // the CTA's own rows: of q and dout, or of k and v
  float p[THREADS], ds[THREADS];              // of a segment
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

template <typename T>
__device__ T* row_of(T* array_g, const Strides& strides, int batch, int head, int token) {
  return array_g + batch * strides.batch + head * strides.head + token * strides.seq;
}

template <int kDim>
__device__ void load_row(float* row_s, const Item* row_g) {
  for (int d = threadIdx.x; d < kDim; d += THREADS) row_s[d] = static_cast<float>(row_g[d]);
}

template <int kDim>
__device__ float dot(const float* a_s, const Item* b_g) {
  float sum = 0.f;
#pragma unroll 4
  for (int d = 0; d < kDim; d++) sum += a_s[d] * static_cast<float>(b_g[d]);
  return sum;
}

// delta of a query: how much its probabilities' gradients have in common.
__device__ float row_delta(const Inputs& in, const TeachingBackwardParams& params, int batch, int head, int row) {
  const Item* dout_row_g = row_of(in.dout, params.dout, batch, head, row);
  const Item* out_row_g = row_of(in.out, params.out, batch, head, row);
  float delta = 0.f;
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM_V; d++) delta += static_cast<float>(dout_row_g[d]) * static_cast<float>(out_row_g[d]);
  return in.dlse == nullptr ? delta : delta - *row_of(in.dlse, params.dlse, batch, head, row);
}

// p and ds of this thread's score of a segment, for all threads.
__device__ void share_score(Smem& smem, float s, float dp, float lse, float delta) {
  const float p = s > lse ? 1.f : expf(s - lse);  // a NaN stays one
  smem.p[threadIdx.x] = p;
  smem.ds[threadIdx.x] = p * (dp - delta);
}

// This thread's columns of a sum of rows, each times a weight.
template <int kDim>
struct WeightedSum {
  static constexpr int kColumns = (kDim + THREADS - 1) / THREADS;
  float acc[kColumns] = {};

  __device__ void add_segment(const float* weights_s, const Item* rows_g, long long row_stride, int rows) {
    for (int c = 0; c < kColumns; c++) {
      const int col = threadIdx.x + c * THREADS;
      if (col >= kDim) continue;
      for (int i = 0; i < rows; i++) acc[c] += weights_s[i] * static_cast<float>(rows_g[i * row_stride + col]);
    }
  }

  __device__ void store(Item* row_g, float factor, bool accumulate) const {
    for (int c = 0; c < kColumns; c++) {
      const int col = threadIdx.x + c * THREADS;
      if (col >= kDim) continue;
      const float before = accumulate ? static_cast<float>(row_g[col]) : 0.f;
      row_g[col] = Item(before + factor * acc[c]);
    }
  }
};

// A CTA that owns a query: dq.
__device__ void query_gradient(Smem& smem, const Inputs& in, Item* dq_g, const TeachingBackwardParams& params,
                               int index) {
  const int row = index % params.sq, head = index / params.sq % params.heads, batch = index / params.sq / params.heads;
  const int kv_head = head / params.group;
  const int keys = params.causal ? max(0, min(params.sk, row + params.sk - params.sq + 1)) : params.sk;
  load_row<HEAD_DIM>(smem.first, row_of(in.q, params.q, batch, head, row));
  load_row<HEAD_DIM_V>(smem.second, row_of(in.dout, params.dout, batch, head, row));
  const float lse = *row_of(in.lse, params.lse, batch, head, row);
  const float delta = row_delta(in, params, batch, head, row);

  WeightedSum<HEAD_DIM> dq;
  for (int first = 0; first < keys; first += THREADS) {
    const int key = first + threadIdx.x;
    __syncthreads();  // q and dout: written, the first time; p and ds: the previous segment has been read
    if (key < keys) {
      const float s = params.softmax_scale * dot<HEAD_DIM>(smem.first, row_of(in.k, params.k, batch, kv_head, key));
      const float dp = dot<HEAD_DIM_V>(smem.second, row_of(in.v, params.v, batch, kv_head, key));
      share_score(smem, s, dp, lse, delta);
    }
    __syncthreads();  // p and ds: this segment has been written
    dq.add_segment(smem.ds, row_of(in.k, params.k, batch, kv_head, first), params.k.seq, min(THREADS, keys - first));
  }
  dq.store(row_of(dq_g, params.dq, batch, head, row), params.softmax_scale, params.accumulate);
}

// A CTA that owns a key: dk and dv.
__device__ void key_gradients(Smem& smem, const Inputs& in, Item* dk_g, Item* dv_g,
                              const TeachingBackwardParams& params, int index) {
  const int kv_heads = params.heads / params.group;
  const int key = index % params.sk, kv_head = index / params.sk % kv_heads, batch = index / params.sk / kv_heads;
  const int begin = params.causal ? max(0, key + params.sq - params.sk) : 0;  // the first query that sees the key
  load_row<HEAD_DIM>(smem.first, row_of(in.k, params.k, batch, kv_head, key));
  load_row<HEAD_DIM_V>(smem.second, row_of(in.v, params.v, batch, kv_head, key));

  WeightedSum<HEAD_DIM> dk;
  WeightedSum<HEAD_DIM_V> dv;
  for (int head = kv_head * params.group; head < (kv_head + 1) * params.group; head++) {
    for (int first = begin; first < params.sq; first += THREADS) {
      const int row = first + threadIdx.x;
      __syncthreads();  // k and v: written, the first time; p and ds: the previous segment has been read
      if (row < params.sq) {
        const float s = params.softmax_scale * dot<HEAD_DIM>(smem.first, row_of(in.q, params.q, batch, head, row));
        const float dp = dot<HEAD_DIM_V>(smem.second, row_of(in.dout, params.dout, batch, head, row));
        share_score(smem, s, dp, *row_of(in.lse, params.lse, batch, head, row),
                    row_delta(in, params, batch, head, row));
      }
      __syncthreads();  // p and ds: this segment has been written
      const int segment = min(THREADS, params.sq - first);
      dk.add_segment(smem.ds, row_of(in.q, params.q, batch, head, first), params.q.seq, segment);
      dv.add_segment(smem.p, row_of(in.dout, params.dout, batch, head, first), params.dout.seq, segment);
    }
  }
  dk.store(row_of(dk_g, params.dk, batch, kv_head, key), params.softmax_scale, params.accumulate);
  dv.store(row_of(dv_g, params.dv, batch, kv_head, key), 1.f, params.accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_naive(const Item* dout_g, const Item* q_g, const Item* k_g, const Item* v_g, const Item* out_g,
                             const float* lse_g, const float* dlse_g, Item* dq_g, Item* dk_g, Item* dv_g,
                             const TeachingBackwardParams params) {
  __shared__ Smem smem;
  const Inputs in = {dout_g, q_g, k_g, v_g, out_g, lse_g, dlse_g};
  const int queries = params.batch * params.heads * params.sq;
  const int index = blockIdx.x;
  if (index < queries) {
    query_gradient(smem, in, dq_g, params, index);
  } else {
    key_gradients(smem, in, dk_g, dv_g, params, index - queries);
  }
}
