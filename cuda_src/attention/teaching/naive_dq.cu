// Attention backward, the textbook way, first step: the gradient of the queries.
//
//   ds_ij = p_ij (dout_i . v_j - delta_i) (score_gradient.cuh),   delta_i = dout_i . out_i - dlse_i,
//   dq_i = softmax_scale * sum_j ds_ij k_j
//
// (Dao et al., arXiv:2205.14135, appendix B.2). Every score is computed again from q, k and lse, and nothing of size
// Sq x Sk is stored. delta is left for the steps that follow: naive_dkdv.cu, _dbias.cu and _dsinks.cu.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous.
//           float16, bfloat16 or float32 in, float32 inside, one rounding at the store.
// Work      as naive.cu: one CTA of THREADS threads owns one query row, grid B * H * Sq. In a strip of THREADS keys
//           each thread owns one score; then it owns the columns threadIdx.x, threadIdx.x + THREADS, ... of dq.
// Budget    shared memory (HEAD_DIM + HEAD_DIM_V + THREADS + one per warp) floats.
// Edges     the last strip by predicate; a row without keys gives dq = 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(SHARED_BYTES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "naive_gradient.cuh"

struct Traits : NaiveTraits {
  static constexpr int kStrip = kThreads;                      // keys at a time: one score per thread
  static constexpr int kColumns = div_up(kHeadDim, kThreads);  // columns of dq per thread
};

struct Smem {
  float q[Traits::kHeadDim];
  float dout[Traits::kHeadDimV];
  float ds[Traits::kStrip];
  float partial[Traits::kThreads / kWarpSize];
};
static_assert(sizeof(Smem) == SHARED_BYTES, "the table counts other shared memory");

__device__ __forceinline__ float row_delta(const float* dout_s, const Traits::Scalar* out_row_g, float* partial_s) {
  float sum = 0.f;
  for (int d = threadIdx.x; d < Traits::kHeadDimV; d += Traits::kThreads) sum += dout_s[d] * to_float(out_row_g[d]);
  return cta_reduce<Sum, Traits::kThreads>(sum, partial_s);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_naive_dq(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                const Traits::Scalar* v_g, const Traits::Scalar* out_g, const float* lse_g,
                                const float* dlse_g, const void* q_offsets_g, const void* seqused_k_g,
                                const void* bias_g, const void* mask_g, const void* slopes_g MODIFIER_ARRAYS,
                                float* delta_g, Traits::Scalar* dq_g, const BackwardParams params MODIFIER_STRIDES) {
  __shared__ Smem smem;
  const AttentionParams& forward = params.attention;
  const int thread = threadIdx.x;

  // Phase 1: the row, and the keys that it sees.
  const Place place = place_of_cta(forward, 1);
  const int row = place.first_row;
  const KeyWindow window = sequence_window(forward, q_offsets_g, seqused_k_g, place.batch);
  const KeyRange visible = window.of_row(row);
  const Traits::Scalar* q_row_g = head_rows(q_g, forward.q, place.batch, place.head, row);
  const Traits::Scalar* dout_row_g = head_rows(dout_g, params.dout, place.batch, place.head, row);
  const Traits::Scalar* k_rows_g = head_rows(k_g, forward.k, place.batch, place.kv_head, 0);
  const Traits::Scalar* v_rows_g = head_rows(v_g, forward.v, place.batch, place.kv_head, 0);
  for (int d = thread; d < Traits::kHeadDim; d += Traits::kThreads) smem.q[d] = to_float(q_row_g[d]);
  for (int d = thread; d < Traits::kHeadDimV; d += Traits::kThreads) smem.dout[d] = to_float(dout_row_g[d]);
  __syncthreads();  // q and dout: written by all, read by all from here on

  // Phase 2: delta.
  const Traits::Scalar* out_row_g = head_rows(out_g, forward.out, place.batch, place.head, row);
  float delta = row_delta(smem.dout, out_row_g, smem.partial);
  if (dlse_g != nullptr) delta -= *head_rows(dlse_g, params.dlse, place.batch, place.head, row);
  if (thread == 0) delta_rows(delta_g, forward, place.batch, place.head)[row] = delta;
  const RowSums sums(*head_rows(lse_g, forward.lse, place.batch, place.head, row), delta);

  // Phase 3: ds, and its product with the keys, one strip of keys after the other.
  const Traits::Pass pass(forward, bias_g, mask_g, slopes_g, place, query_offset(forward, q_offsets_g, place.batch),
                          MODIFIERS);
  float acc[Traits::kColumns] = {};
  for (int first = visible.begin; first < visible.end; first += Traits::kStrip) {
    const int key = first + thread;
    float ds = 0.f;
    if (key < visible.end) {
      const float product = dot<Traits::kHeadDim>(smem.q, k_rows_g + key * forward.k.seq);
      const float dp = dot<Traits::kHeadDimV>(smem.dout, v_rows_g + key * forward.v.seq);
      ds = score_gradient(pass, sums, row, key, product, dp).dproduct;
    }
    __syncthreads();  // ds: the previous strip has been read
    smem.ds[thread] = ds;
    __syncthreads();  // ds: this strip has been written

    const int strip = min(Traits::kStrip, visible.end - first);
#pragma unroll
    for (int c = 0; c < Traits::kColumns; c++) {
      const int col = thread + c * Traits::kThreads;
      if (col < Traits::kHeadDim) {
        for (int j = 0; j < strip; j++) acc[c] += smem.ds[j] * to_float(k_rows_g[(first + j) * forward.k.seq + col]);
      }
    }
  }

  // Phase 4: scale and store.
  Traits::Scalar* dq_row_g = head_rows(dq_g, params.dq, place.batch, place.head, row);
#pragma unroll
  for (int c = 0; c < Traits::kColumns; c++) {
    const int col = thread + c * Traits::kThreads;
    if (col < Traits::kHeadDim) store_gradient(dq_row_g + col, params.scale * acc[c], params);
  }
}
