// Attention backward, the textbook way, third step: the gradient of the bias.
//
//   dbias = ds (score_gradient.cuh), summed over the axes that the bias broadcasts along
//
// The owner of an item of dbias computes all scores that the item was added to, once more: no atomics, and the same
// result from run to run.
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous,
//           from naive_dq.cu; dbias as bias, one of (B or 1, H or 1, Sq or 1, Sk or 1).
// Work      LANES threads (1, or a warp) own one item: each computes the scores LANES apart. Grid ceil(items / (THREADS
//           / LANES)). The order of the additions is fixed.
// Edges     scores outside of what their row sees add nothing; no scores at all give 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(LANES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and LANES come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "naive_gradient.cuh"

struct Traits : NaiveTraits {
  static constexpr int kLanes = LANES;
  static constexpr int kItems = kThreads / kLanes;  // of dbias, per CTA
  static_assert(kLanes == 1 || kLanes == kWarpSize, "a thread or a warp owns an item");
};

// A place among the scores (B, H, Sq, Sk), or how many there are.
struct ScoreIndex {
  int batch, head, row, key;

  // Place number `at` of `extents`, keys fastest.
  __device__ __forceinline__ static ScoreIndex number(int64 at, const ScoreIndex& extents) {
    ScoreIndex place;
    place.key = static_cast<int>(at % extents.key);
    at /= extents.key;
    place.row = static_cast<int>(at % extents.row);
    at /= extents.row;
    place.head = static_cast<int>(at % extents.head);
    place.batch = static_cast<int>(at / extents.head);
    return place;
  }

  __device__ __forceinline__ ScoreIndex operator+(const ScoreIndex& other) const {
    return {batch + other.batch, head + other.head, row + other.row, key + other.key};
  }

  __device__ __forceinline__ int64 count() const { return static_cast<int64>(batch) * head * row * key; }
};

struct Arrays {
  const Traits::Scalar *dout_g, *q_g, *k_g, *v_g;
  const float *lse_g, *delta_g;
  const void *q_offsets_g, *seqused_k_g, *bias_g, *mask_g, *slopes_g;
  Modifiers modifiers;
};

__device__ __forceinline__ float score_ds(const Arrays& arrays, const ScoreIndex& at, const BackwardParams& params) {
  const AttentionParams& forward = params.attention;
  const KeyWindow window = sequence_window(forward, arrays.q_offsets_g, arrays.seqused_k_g, at.batch);
  if (!window.of_row(at.row).contains(at.key)) return 0.f;
  const int kv_head = at.head / forward.group;
  const Traits::Pass pass(forward, arrays.bias_g, arrays.mask_g, arrays.slopes_g,
                          Place{at.batch, at.head, kv_head, at.row, forward.sq, forward.sk},
                          query_offset(forward, arrays.q_offsets_g, at.batch), arrays.modifiers);
  const RowSums sums(*head_rows(arrays.lse_g, forward.lse, at.batch, at.head, at.row),
                     delta_rows(arrays.delta_g, forward, at.batch, at.head)[at.row]);
  const float product = dot<Traits::kHeadDim>(head_rows(arrays.q_g, forward.q, at.batch, at.head, at.row),
                                              head_rows(arrays.k_g, forward.k, at.batch, kv_head, at.key));
  const float dp = dot<Traits::kHeadDimV>(head_rows(arrays.dout_g, params.dout, at.batch, at.head, at.row),
                                          head_rows(arrays.v_g, forward.v, at.batch, kv_head, at.key));
  return score_gradient(pass, sums, at.row, at.key, product, dp).ds;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_naive_dbias(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
                                   const Traits::Scalar* v_g, const float* lse_g, const float* delta_g,
                                   const void* q_offsets_g, const void* seqused_k_g, const void* bias_g,
                                   const void* mask_g, const void* slopes_g MODIFIER_ARRAYS, BIAS* dbias_g,
                                   const BackwardParams params MODIFIER_STRIDES) {
  const AttentionParams& forward = params.attention;
  const ScoreStrides& strides = params.dbias;
  const int lane = threadIdx.x % Traits::kLanes;
  const Arrays arrays = {dout_g,      q_g,         k_g,    v_g,    lse_g,    delta_g,
                         q_offsets_g, seqused_k_g, bias_g, mask_g, slopes_g, MODIFIERS};

  // Phase 1: the item, and the scores that it was added to.
  const ScoreIndex scores = {params.batch, forward.heads, forward.sq, forward.sk};
  const ScoreIndex items = {strides.batch ? scores.batch : 1, strides.head ? scores.head : 1,
                            strides.row ? scores.row : 1, strides.key ? scores.key : 1};
  const ScoreIndex terms = {strides.batch ? 1 : scores.batch, strides.head ? 1 : scores.head,
                            strides.row ? 1 : scores.row, strides.key ? 1 : scores.key};
  const int64 item = blockIdx.x * static_cast<int64>(Traits::kItems) + threadIdx.x / Traits::kLanes;
  const bool exists = item < items.count();  // a warp may hold items beyond the last: they take part with no scores
  const ScoreIndex first = ScoreIndex::number(exists ? item : 0, items);

  // Phase 2: the sum of their gradients.
  float sum = 0.f;
  const int64 count = exists ? terms.count() : 0;
  for (int64 term = lane; term < count; term += Traits::kLanes) {
    sum += score_ds(arrays, first + ScoreIndex::number(term, terms), params);
  }
  sum = warp_reduce<Sum, Traits::kLanes>(sum);

  if (exists && lane == 0) {
    store_gradient(dbias_g + first.batch * strides.batch + first.head * strides.head + first.row * strides.row +
                       first.key * strides.key,
                   sum, params);
  }
}
