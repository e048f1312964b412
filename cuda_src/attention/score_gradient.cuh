// From the products q . k and dout . v to the gradient of one score, in float32 arithmetic.
//
//   p = exp(s - lse),   ds = p (keep dout . v - delta),   delta = rowsum(dout * out) - dlse
//
// (Dao et al., arXiv:2205.14135, appendix B.2; keep is dropout's factor). The score s is that of the forward kernels
// (scores.cuh); lse and delta are given, so every score is recomputed without its row's other scores.
#pragma once

#include "scores.cuh"

// A fragment of one score, for ScorePass.
struct SingleScore {
  float pair[2];  // the second is nobody's

  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
    body(pair, 0, 0);
  }
  __device__ __forceinline__ static int lane_row() { return 0; }
  __device__ __forceinline__ static int lane_key() { return 0; }
};

// What the gradient of a score needs of its query's row.
struct RowSums {
  float lse_log2, delta;

  // A row without keys has lse = -inf, and so, in log2, one whose keys are all hidden by float32's lowest number:
  // infinity in its place gives every weight 0.
  __device__ __forceinline__ RowSums(float lse, float delta_)
      : lse_log2(lse * kLog2E == -kInfinity ? kInfinity : lse * kLog2E), delta(delta_) {}

  // At most 1: of an lse beyond 1e7 (a bias of such a size on all keys) the rounding alone is worth more than a key.
  __device__ __forceinline__ float weight(float s_log2) const { return ex2_approx(at_most(s_log2 - lse_log2, 0.f)); }
};

struct ScoreGradient {
  float p;         // the weight of the key's value, dropout's factor included
  float ds;        // of the score before score_mod: a term of dbias
  float dproduct;  // of softmax_scale * q . k: ds times the softcap's slope
};

template <typename Pass>
__device__ __forceinline__ ScoreGradient score_gradient(const Pass& pass, const RowSums& sums, int row, int key,
                                                        float product, float dp) {
  using Options = typename Pass::Options;
  const ScoreParams& params = pass.params.scores;
  float s_log2 = product * pass.params.scale_log2, unmodified = 0.f;
  if constexpr (Pass::kNeeded) {
    SingleScore score = {{product, 0.f}};
    pass.template apply_options<true>(score, row, key);
    unmodified = score.pair[0];
    pass.modify(score, row, key);
    pass.template hide<true>(score, row, key, /*partial=*/true);
    s_log2 = score.pair[0] * kLog2E;
  }
  if (s_log2 == -kInfinity) return {};

  const float keep = Options::kDropout ? dropout_factor(params, pass.batch, pass.head, row, key) : 1.f;
  const float p = sums.weight(s_log2);
  float ds = p * (keep * dp - sums.delta);
  if constexpr (Options::Modifiers::kScore) ds = pass.gradient(unmodified, ds, row, key);
  return {p * keep, ds, Options::kSoftcap ? ds * softcap_slope(product, params) : ds};
}

template <int kDim, typename A, typename B>
__device__ __forceinline__ float dot(const A* a, const B* b) {
  float sum = 0.f;
#pragma unroll 8
  for (int d = 0; d < kDim; d++) sum += to_float(a[d]) * to_float(b[d]);
  return sum;
}
