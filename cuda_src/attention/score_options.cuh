// From products q . k to the scores that enter the softmax: scale or softcap, then bias and ALiBi, then a mask of bools. Each option is a compile-time switch; an absent array's dtype is void.
#pragma once

#include "../common/vec.cuh"
#include "params.cuh"
#include "score_fragment.cuh"

template <typename Dtype>
constexpr bool kGiven = true;
template <>
constexpr bool kGiven<void> = false;

// tanh y = 1 - 2 / (1 + exp(2 y)), right to a few ulp: tanh.approx errs by 2^-11, which is 0.02 in a score of
// softcap 50.
__device__ __forceinline__ float softcapped(float product, const ScoreParams& params) {
  const float exp_2y = ex2_approx(product * params.softcap_in);
  return __fmaf_rn(rcp_approx(1.f + exp_2y), -2.f * params.softcap, params.softcap);
}

// One (Sq, Sk) matrix of a broadcast array: an item is read where its key exists.
template <typename Item, int kVec>
struct ScoreMatrix {
  const Item* items_g;
  int64 row_stride, key_stride;
  int last_row, keys;

  __device__ __forceinline__ ScoreMatrix(const void* array_g, const ScoreStrides& strides, int batch, int head, int sq,
                                         int sk)
      : items_g(static_cast<const Item*>(array_g) + batch * strides.batch + head * strides.head),
        row_stride(strides.row),
        key_stride(strides.key),
        last_row(sq - 1),
        keys(sk) {}

  // Items of a row's keys `key` and `key + 1`; what lies outside of the matrix comes as `outside`.
  template <bool kRagged>
  __device__ __forceinline__ void load_pair(Item (&pair)[2], int row, int key, Item outside) const {
    const Item* row_g = items_g + min(row, last_row) * row_stride;  // rows beyond Sq are computed and not stored
    if (kVec == 2 && (!kRagged || key + 1 < keys)) {
      const auto both = *reinterpret_cast<const Vec<Item, 2>*>(row_g + key);
      pair[0] = both.item[0];
      pair[1] = both.item[1];
      return;
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      pair[e] = !kRagged || key + e < keys ? row_g[(key + e) * key_stride] : outside;
    }
  }
};

template <typename Bias, int kBiasVec, bool kMask, typename Slopes, bool kSoftcap>
struct ScoreOptions {
  // Whether the scores need a pass of their own before the exponential; without one the scale rides on its FMA.
  static constexpr bool kPass = kGiven<Bias> || kMask || kGiven<Slopes> || kSoftcap;

  const ScoreParams& params;
  const void *bias_g, *mask_g;
  int batch, head, sq, sk;
  float softmax_scale, slope = 0.f;
  int64 q_offset;

  __device__ __forceinline__ ScoreOptions(const AttentionParams& all, const void* bias, const void* mask,
                                          const void* slopes, const Place& place, int64 offset)
      : params(all.scores),
        bias_g(bias),
        mask_g(mask),
        batch(place.batch),
        head(place.head),
        sq(all.sq),
        sk(all.sk),
        softmax_scale(all.softmax_scale),
        q_offset(offset) {
    if constexpr (kGiven<Slopes>) {
      const int64 at = batch * params.slopes_batch + head * params.slopes_head;
      slope = to_float(static_cast<const Slopes*>(slopes)[at]);
    }
  }

  // kRagged: the tile may reach beyond Sk.
  template <bool kRagged, typename Fragment>
  __device__ __forceinline__ void apply(Fragment& fragment, int first_row, int first_key) const {
    fragment.for_each_pair([&](float* pair, int, int) {
      pair[0] = kSoftcap ? softcapped(pair[0], params) : pair[0] * softmax_scale;
      pair[1] = kSoftcap ? softcapped(pair[1], params) : pair[1] * softmax_scale;
    });
    if constexpr (kGiven<Bias>) {
      const ScoreMatrix<Bias, kBiasVec> matrix(bias_g, params.bias, batch, head, sq, sk);
      fragment.for_each_pair([&](float* pair, int row, int key) {
        Bias bias[2];
        matrix.template load_pair<kRagged>(bias, first_row + row, first_key + key, from_float<Bias>(0.f));
        pair[0] += to_float(bias[0]);
        pair[1] += to_float(bias[1]);
      });
    }
    if constexpr (kGiven<Slopes>) {
      // Distances beyond 2^24 would not be whole in float32; no array is that long.
      const float from = static_cast<float>(first_row + q_offset - first_key);
      fragment.for_each_pair([&](float* pair, int row, int key) {
        const float distance = from + static_cast<float>(row - key);
        pair[0] = __fmaf_rn(-slope, fabsf(distance), pair[0]);
        pair[1] = __fmaf_rn(-slope, fabsf(distance - 1.f), pair[1]);
      });
    }
    if constexpr (kMask) {
      const ScoreMatrix<unsigned char, 1> matrix(mask_g, params.mask, batch, head, sq, sk);
      fragment.for_each_pair([&](float* pair, int row, int key) {
        unsigned char attend[2];
        matrix.template load_pair<kRagged>(attend, first_row + row, first_key + key, 0);
        if (!attend[0]) pair[0] = -kInfinity;
        if (!attend[1]) pair[1] = -kInfinity;
      });
    }
  }
};
