// From the products q . k and dout . v to the gradient of one score, for kernels with one score a thread.
//
//   p = exp(s - lse),   ds = p (keep dout . v - delta),   delta = rowsum(dout * out) - dlse
//
// (Dao et al., arXiv:2205.14135, appendix B.2; keep is dropout's factor). The score s is that of the forward kernels
// (score_options.cuh); lse and delta are given, so every score is recomputed without its row's other scores.
#pragma once

#include "../common/philox.cuh"
#include "score_options.cuh"

// A fragment of one score: what score_options.cuh does to the fragments of tensor cores it does to this.
struct SingleScore {
  float pair[2];  // the second is nobody's

  template <typename Body>
  __device__ __forceinline__ void for_each_pair(Body body) {
    body(pair, 0, 0);
  }
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
  float ds;        // of the score that enters the softmax: a term of dbias
  float dproduct;  // of softmax_scale * q . k: ds times the softcap's slope
};

// d/dx of softcap tanh(x / softcap), x = softmax_scale * product: 1 - tanh^2 = 4 r (1 - r) with tanh = 1 - 2 r.
__device__ __forceinline__ float softcap_slope(float product, const ScoreParams& params) {
  const float r = rcp_approx(1.f + ex2_approx(product * params.softcap_in));
  return 4.f * r * (1.f - r);
}

__device__ __forceinline__ float dropout_factor(const ScoreParams& params, int batch, int head, int row, int key) {
  const Philox4 words = dropout_words(params.seed, batch, head, row, key);
  return dropout_field(words, key) >= params.keep_from ? params.keep_scale : 0.f;
}

template <bool kSoftcap, bool kDropout, typename Options>
__device__ __forceinline__ ScoreGradient score_gradient(const Options& options, float scale_log2, const RowSums& sums,
                                                        int row, int key, float product, float dp) {
  float s_log2 = product * scale_log2;
  if constexpr (Options::kPass) {
    SingleScore score = {{product, 0.f}};
    options.template apply<true>(score, row, key);
    s_log2 = score.pair[0] * kLog2E;
  }
  if (s_log2 == -kInfinity) return {};

  const float keep = kDropout ? dropout_factor(options.params, options.batch, options.head, row, key) : 1.f;
  const float p = sums.weight(s_log2);
  const float ds = p * (keep * dp - sums.delta);
  return {p * keep, ds, kSoftcap ? ds * softcap_slope(product, options.params) : ds};
}

template <int kDim, typename A, typename B>
__device__ __forceinline__ float dot(const A* a, const B* b) {
  float sum = 0.f;
#pragma unroll 8
  for (int d = 0; d < kDim; d++) sum += to_float(a[d]) * to_float(b[d]);
  return sum;
}
