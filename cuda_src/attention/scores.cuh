// The effect of each option on a score, forward and backward, for every attention kernel.
//
//   s = softmax_scale * q . k, or softcap * tanh(softmax_scale * q . k / softcap)
//       + bias - slope * |position of the query - position of the key|, then the user's score_mod (modifiers.cuh);
//   a mask of bools hides scores, and so does the user's mask_mod
//   ds / d(softmax_scale * q . k) = 1, or 1 - tanh^2;   ds / dbias = 1;   dropout keeps p / (1 - dropout_p), or 0
//
// Each option is a compile-time switch; an absent array's dtype is void.
#pragma once

#include "../common/philox.cuh"
#include "../common/vec.cuh"
#include "no_modifiers.cuh"
#include "params.cuh"

template <typename Dtype>
constexpr bool kGiven = true;
template <>
constexpr bool kGiven<void> = false;

template <typename Bias_, bool kMask_, typename Slopes_, bool kSoftcap_, bool kDropout_,
          typename Modifiers_ = NoModifiers>
struct ScoreOptions {
  using Bias = Bias_;
  using Slopes = Slopes_;
  using Modifiers = Modifiers_;
  static constexpr bool kMask = kMask_, kSoftcap = kSoftcap_, kDropout = kDropout_;
  // Whether a score is more than its scaled product; if not, the scale rides on the exponential's FMA.
  static constexpr bool kBeyondScale = kGiven<Bias> || kGiven<Slopes> || kSoftcap || Modifiers::kScore;
};

// The indices that an expression gets. Rows and keys that do not exist, which kernels compute and drop, count as the
// last.
struct ScoreIndices {
  int batch, head, row, key;

  __device__ __forceinline__ ScoreIndices(int sq, int sk, int batch_, int head_, int row_, int key_)
      : batch(batch_), head(head_), row(min(row_, sq - 1)), key(min(key_, sk - 1)) {}
};

// tanh y = 1 - 2 r and 1 - tanh^2 y = 4 r (1 - r) with r = 1 / (1 + exp(2 y)), right to a few ulp: tanh.approx errs by
// 2^-11, which is 0.02 in a score of softcap 50.
__device__ __forceinline__ float softcap_r(float product, const ScoreParams& params) {
  return rcp_approx(1.f + ex2_approx(product * params.softcap_in));
}

// The softcap's part of the gradient of softmax_scale * q . k.
__device__ __forceinline__ float softcap_slope(float product, const ScoreParams& params) {
  const float r = softcap_r(product, params);
  return 4.f * __fmaf_rn(-r, r, r);
}

// The factor of a score's probability, and of the gradient of that probability.
__device__ __forceinline__ float dropout_factor(const ScoreParams& params, int batch, int head, int row, int key) {
  const Philox4 words = dropout_words(params, batch, head, row, key);
  return dropout_field(words, key) >= params.keep_from ? params.keep_scale : 0.f;
}

// The distance from a key to a later query: an integer, rounded once. A float has 24 bits, and positions may have more;
// so what is common to a thread's scores is kept as a multiple of 2^16 and a rest, which both are exact (below 2^40).
struct Distance {
  float far, near;

  __device__ __forceinline__ explicit Distance(int64 distance)
      : far(static_cast<float>(distance & ~0xffffLL)), near(static_cast<float>(static_cast<int>(distance & 0xffff))) {}

  // Some rows and keys further. In this order: equal distances of several rows would otherwise wait in registers.
  __device__ __forceinline__ float plus(int rows, int keys) const {
    return far + ((near + static_cast<float>(rows)) - static_cast<float>(keys));
  }
};

// The steps from a product to the score of one head, in units of kUnit.
template <typename Options, Unit kUnit>
struct ScoreRule {
  static constexpr float kFactor = kUnit == Unit::kLog2 ? kLog2E : 1.f;

  const ScoreParams& params;
  float scale, slope = 0.f;

  __device__ __forceinline__ ScoreRule(const AttentionParams& all, const void* slopes_g, int batch, int head)
      : params(all.scores), scale(kUnit == Unit::kLog2 ? all.scale_log2 : all.softmax_scale) {
    if constexpr (kGiven<typename Options::Slopes>) {
      const auto* items_g = static_cast<const typename Options::Slopes*>(slopes_g);
      slope = to_float(items_g[batch * params.slopes_batch + head * params.slopes_head]) * kFactor;
    }
  }

  __device__ __forceinline__ float of_product(float product) const {
    if constexpr (!Options::kSoftcap) return product * scale;
    const float softcap = params.softcap * kFactor;
    return __fmaf_rn(softcap_r(product, params), -2.f * softcap, softcap);
  }
  // Four capped scores by one reciprocal, that of the product of their denominators. From 2^31 on a denominator leaves
  // the softcap as it is, and four of them have a product within float32.
  __device__ __forceinline__ void cap_four(float* (&four)[4]) const {
    constexpr float kMostLog2 = 31.f;
    const float softcap = params.softcap * kFactor;
    float of[4];
#pragma unroll
    for (int x = 0; x < 4; x++) of[x] = 1.f + ex2_approx(min_or_nan(*four[x] * params.softcap_in, kMostLog2));
    const float first = of[0] * of[1], second = of[2] * of[3];
    const float r = rcp_approx(first * second), of_first = r * second, of_second = r * first;
    *four[0] = __fmaf_rn(of_first * of[1], -2.f * softcap, softcap);
    *four[1] = __fmaf_rn(of_first * of[0], -2.f * softcap, softcap);
    *four[2] = __fmaf_rn(of_second * of[3], -2.f * softcap, softcap);
    *four[3] = __fmaf_rn(of_second * of[2], -2.f * softcap, softcap);
  }
  __device__ __forceinline__ float with_bias(float score, float bias) const {
    return kUnit == Unit::kLog2 ? __fmaf_rn(bias, kLog2E, score) : score + bias;
  }
  __device__ __forceinline__ float with_alibi(float score, float distance) const {
    return __fmaf_rn(-slope, fabsf(distance), score);
  }
};

// One (Sq, Sk) matrix of a broadcast array: an item is read where its key exists.
template <typename Item_>
struct ScoreMatrix {
  using Item = Item_;

  const Item* items_g;
  int64 row_stride, key_stride;
  int last_row, keys;
  Item outside;  // in place of what lies outside of the matrix

  __device__ __forceinline__ ScoreMatrix(const void* array_g, const ScoreStrides& strides, int batch, int head, int sq,
                                         int sk, Item outside_)
      : items_g(static_cast<const Item*>(array_g) + batch * strides.batch + head * strides.head),
        row_stride(strides.row),
        key_stride(strides.key),
        last_row(sq - 1),
        keys(sk),
        outside(outside_) {}

  // Items of `row` from `key` on. Rows beyond Sq are computed and not stored. kVec: as many neighbouring keys are read
  // at once.
  template <bool kRagged, int kVec, int kItems>
  __device__ __forceinline__ void load(Item (&items)[kItems], int row, int key) const {
    const Item* row_g = items_g + min(row, last_row) * row_stride;
    if (kVec == kItems && (!kRagged || key + kItems <= keys)) {
      const auto vec = *reinterpret_cast<const Vec<Item, kItems>*>(row_g + key);
#pragma unroll
      for (int e = 0; e < kItems; e++) items[e] = vec.item[e];
      return;
    }
#pragma unroll
    for (int e = 0; e < kItems; e++) {
      items[e] = !kRagged || key + e < keys ? row_g[(key + e) * key_stride] : outside;
    }
  }

  // body(score, item) for each score of a fragment, whose pairs are scores of two neighbouring keys.
  template <bool kRagged, int kVec, typename Fragment, typename Body>
  __device__ __forceinline__ void for_each(Fragment& fragment, int first_row, int first_key, Body body) const {
    fragment.for_each_pair([&](float* pair, int row, int key) {
      Item items[2];
      load<kRagged, kVec>(items, first_row + row, first_key + key);
      body(pair[0], items[0]);
      body(pair[1], items[1]);
    });
  }
};

// Bias and mask of a fragment's scores, read when they are used.
struct ItemsInPlace {
  template <bool kRagged, typename Pass, typename Fragment, typename Body>
  __device__ __forceinline__ void for_each_bias(const Pass& pass, Fragment& fragment, int first_row, int first_key,
                                                Body body) const {
    pass.bias().template for_each<kRagged, Pass::kBiasVec>(fragment, first_row, first_key, body);
  }
  template <bool kRagged, typename Pass, typename Fragment, typename Body>
  __device__ __forceinline__ void for_each_mask(const Pass& pass, Fragment& fragment, int first_row, int first_key,
                                                Body body) const {
    pass.mask().template for_each<kRagged, Pass::kMaskVec>(fragment, first_row, first_key, body);
  }
};

// How a pass applies ALiBi and the softcap. kByKey leaves out of ALiBi what is the same for all scores of a row, for
// keys on one side of all queries: slope * (key - the thread's first key) remains, or minus that. kFours: one
// reciprocal serves four scores of a row, of which all are NaN if one is.
enum class Penalty { kOfDistance, kByKey };
enum class Capping { kEach, kFours };

// A pass over a fragment of products that makes scores of them; what is hidden becomes -inf.
//
// A fragment has for_each_pair: body(pair, row, key) for each two scores of neighbouring keys; lane_row and lane_key
// are those of the thread's first.
template <typename Options_, int kBiasVec_ = 1, int kMaskVec_ = 1>
struct ScorePass {
  using Options = Options_;
  static constexpr int kBiasVec = kBiasVec_, kMaskVec = kMaskVec_;  // neighbouring keys that are read at once
  using Bias = typename Options::Bias;
  using Modifiers = typename Options::Modifiers;
  // Whether there is anything to do but to scale.
  static constexpr bool kNeeded = Options::kBeyondScale || Options::kMask || Modifiers::kMask;
  // For tiles that are seen in full according to a block mask.
  static constexpr bool kNeededInFull =
      Options::kBeyondScale || Options::kMask || (Modifiers::kMask && !Modifiers::kBlocks);

  const AttentionParams& params;
  const void *bias_g, *mask_g;
  ScoreRule<Options, Unit::kNatural> rule;
  int batch, head, cta_row;
  int sq, sk;  // of the sequence: params has those of the longest one
  int64 q_offset;
  Modifiers modifiers;

  __device__ __forceinline__ ScorePass(const AttentionParams& all, const void* bias, const void* mask,
                                       const void* slopes, const TileCoordinates& coords, int64 offset,
                                       const Modifiers& of_user = {})
      : params(all),
        bias_g(bias),
        mask_g(mask),
        rule(all, slopes, coords.batch, coords.head),
        batch(coords.batch),
        head(coords.head),
        cta_row(coords.first_row),
        sq(coords.sq),
        sk(coords.sk),
        q_offset(offset),
        modifiers(of_user) {}

  __device__ __forceinline__ ScoreMatrix<Bias> bias() const {
    return {bias_g, params.scores.bias, batch, head, params.sq, params.sk, from_float<Bias>(0.f)};
  }
  __device__ __forceinline__ ScoreMatrix<unsigned char> mask() const {
    return {mask_g, params.scores.mask, batch, head, params.sq, params.sk, 0};
  }

  // kRagged: the tile may reach beyond Sk; `partial`: a block mask may hide some of it.
  template <bool kRagged, Penalty kPenalty = Penalty::kOfDistance, Capping kCapping = Capping::kEach, typename Fragment,
            typename Items = ItemsInPlace>
  __device__ __forceinline__ void apply(Fragment& fragment, int first_row, int first_key, bool partial,
                                        const Items& items = Items(), float key_slope = 0.f) const {
    apply_options<kRagged, kPenalty, kCapping>(fragment, first_row, first_key, items, key_slope);
    modify(fragment, first_row, first_key);
    hide<kRagged>(fragment, first_row, first_key, partial, items);
  }

  // The steps of `apply`. The library's own options, up to what score_mod is given:
  template <bool kRagged, Penalty kPenalty = Penalty::kOfDistance, Capping kCapping = Capping::kEach, typename Fragment,
            typename Items = ItemsInPlace>
  __device__ __forceinline__ void apply_options(Fragment& fragment, int first_row, int first_key,
                                                const Items& items = Items(), float key_slope = 0.f) const {
    if constexpr (Options::kSoftcap && kCapping == Capping::kFours) {
      fragment.for_each_four([&](float*(&four)[4]) { rule.cap_four(four); });
    } else {
      fragment.for_each_pair([&](float* pair, int, int) {
        pair[0] = rule.of_product(pair[0]);
        pair[1] = rule.of_product(pair[1]);
      });
    }
    if constexpr (kGiven<Bias>) {
      items.template for_each_bias<kRagged>(*this, fragment, first_row, first_key, [&](float& score, Bias item) {
        score = rule.with_bias(score, to_float(item));
      });
    }
    if constexpr (kGiven<typename Options::Slopes> && kPenalty == Penalty::kByKey) {
      const int lane_key = Fragment::lane_key();
      fragment.for_each_pair([&](float* pair, int, int key) {  // rounded products, which all rows share
        pair[0] += __fmul_rn(key_slope, static_cast<float>(key - lane_key));
        pair[1] += __fmul_rn(key_slope, static_cast<float>(key - lane_key + 1));
      });
    } else if constexpr (kGiven<typename Options::Slopes>) {
      const int lane_row = Fragment::lane_row(), lane_key = Fragment::lane_key();
      const Distance distance(first_row + lane_row + q_offset - (first_key + lane_key));
      fragment.for_each_pair([&](float* pair, int row, int key) {  // steps are constants: the lane's part goes
        pair[0] = rule.with_alibi(pair[0], distance.plus(row - lane_row, key - lane_key));
        pair[1] = rule.with_alibi(pair[1], distance.plus(row - lane_row, key - lane_key + 1));
      });
    }
  }

  // The user's score_mod:
  template <typename Fragment>
  __device__ __forceinline__ void modify(Fragment& fragment, int first_row, int first_key) const {
    if constexpr (Modifiers::kScore) {
      for_each_score(fragment, first_row, first_key, [&](float& score, const ScoreIndices& at) {
        score = modifiers.score(score, at.batch, at.head, at.row, at.key);
      });
    }
  }

  // The masks; of a tile that a block mask says is seen in full not the one that it is of:
  template <bool kRagged, typename Fragment, typename Items = ItemsInPlace>
  __device__ __forceinline__ void hide(Fragment& fragment, int first_row, int first_key, bool partial,
                                       const Items& items = Items()) const {
    if constexpr (Options::kMask) {
      items.template for_each_mask<kRagged>(*this, fragment, first_row, first_key,
                                            [](float& score, unsigned char attend) {
                                              if (!attend) score = -kInfinity;
                                            });
    }
    if constexpr (Modifiers::kMask) {
      if (Modifiers::kBlocks && !partial) return;
      for_each_score(fragment, first_row, first_key, [&](float& score, const ScoreIndices& at) {
        if (!modifiers.mask(at.batch, at.head, at.row, at.key)) score = -kInfinity;
      });
    }
  }

  // Apply it in two steps: a bit for each score of what the mask_mod leaves, as for_each_pair counts them, and what is
  // not left becomes -inf. Asked before the products the expression has the registers that scores take later.
  template <typename Fragment, int kWords>
  __device__ __forceinline__ void ask(uint32 (&seen)[kWords], Fragment& fragment, int first_row, int first_key) const {
    int number = 0;
#pragma unroll
    for (int word = 0; word < kWords; word++) seen[word] = 0;
    for_each_score(fragment, first_row, first_key, [&](float&, const ScoreIndices& at) {
      if (modifiers.mask(at.batch, at.head, at.row, at.key)) seen[number / 32] |= 1u << number % 32;
      number++;
    });
  }
  template <typename Fragment, int kWords>
  __device__ __forceinline__ static void hide_unseen(Fragment& fragment, const uint32 (&seen)[kWords]) {
    int number = 0;
    fragment.for_each_pair([&](float* pair, int, int) {
#pragma unroll
      for (int at = 0; at < 2; at++, number++) {
        if (!(seen[number / 32] >> number % 32 & 1u)) pair[at] = -kInfinity;
      }
    });
  }

  // From the gradient of what score_mod makes of a score to that of the score.
  __device__ __forceinline__ float gradient(float score, float ds, int row, int key) const {
    const ScoreIndices at(sq, sk, batch, head, row, key);
    return modifiers.gradient(score, ds, at.batch, at.head, at.row, at.key);
  }

 private:
  template <typename Fragment, typename Body>
  __device__ __forceinline__ void for_each_score(Fragment& fragment, int first_row, int first_key, Body body) const {
    fragment.for_each_pair([&](float* pair, int row, int key) {
#pragma unroll
      for (int at = 0; at < 2; at++) {
        body(pair[at], ScoreIndices(sq, sk, batch, head, first_row + row, first_key + key + at));
      }
    });
  }
};
