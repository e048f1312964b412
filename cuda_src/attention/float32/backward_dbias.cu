// Attention backward in float32 arithmetic: the gradient of a bias that broadcasts.
//
//   dbias = ds = p (keep dout . v - delta) (row_sums.cuh), summed over the axes that the bias broadcasts along
//
// The owner of an item of dbias computes all scores that the item was added to, once more: no atomics, and the same
// result from run to run. (backward_dkdv.cu writes the gradient of a bias that does not broadcast.)
//
// Shapes    AttentionParams (params.cuh), BackwardParams (backward_params.cuh); delta (B, H, Sq) float32, contiguous,
//           from backward_delta.cu; dbias as bias, one of (B or 1, H or 1, Sq or 1, Sk or 1).
// Work      LANES threads (1, or a warp) own one item: each computes the scores LANES apart. Grid ceil(items / (THREADS
//           / LANES)). The order of the additions is fixed.
// Edges     scores outside of what their row sees add nothing; no scores at all give 0.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(THREADS) || !defined(LANES)
#error "DTYPE, HEAD_DIM, HEAD_DIM_V, THREADS and LANES come from a launch-configuration table"
#endif
#if !defined(BIAS) || !defined(MASK) || !defined(SLOPES) || !defined(SOFTCAP) || !defined(DROPOUT) || !defined(MODIFIED)
#error "BIAS, MASK, SLOPES, SOFTCAP, DROPOUT and MODIFIED come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../backward_params.cuh"
#include "../modifiers.cuh"
#include "../scores.cuh"
#include "row_sums.cuh"

struct Traits {
  using Scalar = DTYPE;
  using Options = ScoreOptions<BIAS, MASK, SLOPES, SOFTCAP, DROPOUT, Modifiers>;
  using Pass = ScorePass<Options>;
  static constexpr int kHeadDim = HEAD_DIM;
  static constexpr int kHeadDimV = HEAD_DIM_V;
  static constexpr int kThreads = THREADS;
  static constexpr int kLanes = LANES;
  static constexpr int kItems = kThreads / kLanes;  // of dbias, per CTA
  static_assert(kHeadDim >= 1 && kHeadDim <= 512 && kHeadDimV >= 1 && kHeadDimV <= 512, "head dims are 1 to 512");
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps");
  static_assert(kLanes == 1 || kLanes == kWarpSize, "a thread or a warp owns an item");
  static_assert(kGiven<BIAS>, "there is a bias");
};

// A fragment of one score, for ScorePass.
struct SingleScore {
  float pair[2];  // the second is not used

  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
    body(pair, 0, 0);
  }
  __device__ __forceinline__ static int lane_row() { return 0; }
  __device__ __forceinline__ static int lane_key() { return 0; }
};

// A place among the scores (B, H, Sq, Sk), or how many there are.
struct ScoreIndex {
  int batch, head, row, key;

  // TileCoordinates number `at` of `extents`, keys fastest.
  __device__ __forceinline__ static ScoreIndex number(int64 at, const ScoreIndex& extents) {
    ScoreIndex coords;
    coords.key = static_cast<int>(at % extents.key);
    at /= extents.key;
    coords.row = static_cast<int>(at % extents.row);
    at /= extents.row;
    coords.head = static_cast<int>(at % extents.head);
    coords.batch = static_cast<int>(at / extents.head);
    return coords;
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

template <int kDim>
__device__ __forceinline__ float dot(const Traits::Scalar* a, const Traits::Scalar* b) {
  float sum = 0.f;
#pragma unroll 8
  for (int d = 0; d < kDim; d++) sum += to_float(a[d]) * to_float(b[d]);
  return sum;
}

// The gradient of one score, before score_mod.
__device__ __forceinline__ float score_ds(const Arrays& arrays, const ScoreIndex& at, const BackwardParams& params) {
  const AttentionParams& forward = params.attention;
  const KeyWindow window = sequence_window(forward, arrays.q_offsets_g, arrays.seqused_k_g, at.batch);
  if (!window.of_row(at.row).contains(at.key)) return 0.f;
  const int kv_head = at.head / forward.group;
  const Traits::Pass pass(forward, arrays.bias_g, arrays.mask_g, arrays.slopes_g,
                          TileCoordinates{at.batch, at.head, kv_head, at.row, forward.sq, forward.sk},
                          query_offset(forward, arrays.q_offsets_g, at.batch), arrays.modifiers);
  const float product = dot<Traits::kHeadDim>(head_rows(arrays.q_g, forward.q, at.batch, at.head, at.row),
                                              head_rows(arrays.k_g, forward.k, at.batch, kv_head, at.key));
  SingleScore score = {{product, 0.f}};
  pass.template apply_options<true>(score, at.row, at.key);
  const float unmodified = score.pair[0];
  pass.modify(score, at.row, at.key);
  pass.template hide<true>(score, at.row, at.key, /*partial=*/true);
  if (score.pair[0] == -kInfinity) return 0.f;

  const int64 row = (static_cast<int64>(at.batch) * forward.heads + at.head) * forward.sq + at.row;
  const RowSums sums(*head_rows(arrays.lse_g, forward.lse, at.batch, at.head, at.row), arrays.delta_g[row]);
  const float dp = dot<Traits::kHeadDimV>(head_rows(arrays.dout_g, params.dout, at.batch, at.head, at.row),
                                          head_rows(arrays.v_g, forward.v, at.batch, kv_head, at.key));
  const float keep = DROPOUT ? dropout_factor(forward.scores, at.batch, at.head, at.row, at.key) : 1.f;
  const float ds = sums.weight(score.pair[0] * kLog2E) * (keep * dp - sums.delta);
  if constexpr (Modifiers::kScore) return pass.gradient(unmodified, ds, at.row, at.key);
  return ds;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_backward_f32_dbias(const Traits::Scalar* dout_g, const Traits::Scalar* q_g, const Traits::Scalar* k_g,
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
