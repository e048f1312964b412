// Attention forward, the textbook way: the first step of the tour naive -> tiled -> flash.
//
//   s_j = softmax_scale * q . k_j,   lse = log sum_j exp(s_j),   out = sum_j exp(s_j - lse) v_j
//
// (Vaswani et al., "Attention is all you need", arXiv:1706.03762, equation 1). The softmax of each row is computed as
// written: first its maximum, then the sum of its exponentials. Every score is computed twice, so that nothing of size
// Sq x Sk is stored. Every row reads all keys and values again: tiled.cu shares them.
//
// Shapes    q (B, Sq, H, D), k (B, Sk, G, D), v (B, Sk, G, Dv), out (B, Sq, H, Dv), lse (B, H, Sq). The last axis of q,
//           k, v and out is contiguous; other axes have any stride. H is a multiple of G: query head h reads key-value
//           head h / (H / G). float16, bfloat16 or float32 items, float32 arithmetic; the result is rounded once, at
//           the store.
// Tiles     one query row by a segment of THREADS keys. Each thread owns one score of a segment, and the output columns
//           threadIdx.x, threadIdx.x + THREADS, ...
// Grid      B * H * Sq CTAs (cooperative thread arrays, or blocks) of THREADS threads, a power of two.
// Budget    shared memory: HEAD_DIM + THREADS floats; 64 registers, or 66 above head dim 256.
// Barriers  after q is written; around each write of p_s, which all threads read; the reductions have their own.
// Edges     the last segment is cut by a predicate; a row without keys has out = 0 and lse = -inf; lse_g may be null.
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
static_assert(THREADS <= 1024 && (THREADS & (THREADS - 1)) == 0, "reductions halve the number of threads");
constexpr int kColumns = (HEAD_DIM_V + THREADS - 1) / THREADS;  // output columns of a thread
constexpr float kLowest = -3.402823466e38f;                     // a maximum without keys: m - m is 0, not NaN

struct Strides {
  long long batch, seq, head;  // in items
};

struct TeachingParams {
  Strides q, k, v, out, lse;
  int heads, group, sq, sk;  // H, H / G, Sq, Sk
  int causal;
  float softmax_scale;
};
static_assert(sizeof(TeachingParams) == TEACHING_PARAMS_BYTES, "its dtype in Python describes another struct");

struct Smem {
  float q[HEAD_DIM];
  float p[THREADS];  // exp(s - m) of a segment; the reductions use it too
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

template <typename T>
__device__ T* row_of(T* array_g, const Strides& strides, int batch, int head, int token) {
  return array_g + batch * strides.batch + head * strides.head + token * strides.seq;
}

__device__ float score(const float* q_s, const Item* k_row_g, float softmax_scale) {
  float s = 0.f;
#pragma unroll 4
  for (int d = 0; d < HEAD_DIM; d++) s += q_s[d] * static_cast<float>(k_row_g[d]);
  return s * softmax_scale;
}

__device__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ float sum(float a, float b) { return a + b; }

// Combine the values of all threads: each step combines two halves of those that are left. All threads get the result.
template <float (*combine)(float, float)>
__device__ float reduce(float x, float* values_s) {
  __syncthreads();  // values: what was there has been read
  values_s[threadIdx.x] = x;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // values: the previous step has been written
    if (threadIdx.x < half) values_s[threadIdx.x] = combine(values_s[threadIdx.x], values_s[threadIdx.x + half]);
  }
  __syncthreads();  // values: the last step has been written
  return values_s[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_naive(const Item* q_g, const Item* k_g, const Item* v_g, Item* out_g, float* lse_g,
                    const TeachingParams params) {
  __shared__ Smem smem;
  const int thread = threadIdx.x;

  // Phase 1: the row, and the number of keys that it sees. Under causal order the last query sees all keys.
  const int row = blockIdx.x % params.sq;
  const int head = blockIdx.x / params.sq % params.heads, kv_head = head / params.group;
  const int batch = blockIdx.x / params.sq / params.heads;
  const int keys = params.causal ? max(0, min(params.sk, row + params.sk - params.sq + 1)) : params.sk;
  const Item* q_row_g = row_of(q_g, params.q, batch, head, row);
  for (int d = thread; d < HEAD_DIM; d += THREADS) smem.q[d] = static_cast<float>(q_row_g[d]);
  __syncthreads();  // q: written by all, read by all from here on

  // Phase 2: the row's maximum m.
  float m = kLowest;
  for (int key = thread; key < keys; key += THREADS) {
    m = fmaxf(m, score(smem.q, row_of(k_g, params.k, batch, kv_head, key), params.softmax_scale));
  }
  m = reduce<larger>(m, smem.p);

  // Phase 3: the exponentials, their sum l, and the weighted sum of the values, one segment of keys after another.
  float l = 0.f, acc[kColumns] = {};
  for (int first = 0; first < keys; first += THREADS) {
    const int key = first + thread;
    float p = 0.f;
    if (key < keys) p = expf(score(smem.q, row_of(k_g, params.k, batch, kv_head, key), params.softmax_scale) - m);
    l += p;
    __syncthreads();  // p: the previous segment has been read
    smem.p[thread] = p;
    __syncthreads();  // p: this segment has been written

    const int segment = min(THREADS, keys - first);
    for (int c = 0; c < kColumns; c++) {
      const int col = thread + c * THREADS;
      if (col >= HEAD_DIM_V) continue;
      const Item* v_items_g = row_of(v_g, params.v, batch, kv_head, first) + col;
      for (int j = 0; j < segment; j++) acc[c] += smem.p[j] * static_cast<float>(v_items_g[j * params.v.seq]);
    }
  }
  l = reduce<sum>(l, smem.p);

  // Phase 4: normalise and store. Without keys l is 0, and log(0) is -inf.
  const float normaliser = l == 0.f ? 0.f : 1.f / l;
  Item* out_row_g = row_of(out_g, params.out, batch, head, row);
  for (int c = 0; c < kColumns; c++) {
    const int col = thread + c * THREADS;
    if (col < HEAD_DIM_V) out_row_g[col] = Item(acc[c] * normaliser);
  }
  if (lse_g != nullptr && thread == 0) *row_of(lse_g, params.lse, batch, head, row) = m + logf(l);
}
