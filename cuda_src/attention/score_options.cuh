// From products q . k to the scores that enter the softmax: scale or softcap, then bias and ALiBi, then a mask of bools.
// Each option is a compile-time switch; an absent array's dtype is void.
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
__device__ __forceinline__ float softcapped(float product, float softcap_in, float softcap) {
  const float exp_2y = ex2_approx(product * softcap_in);
  return __fmaf_rn(rcp_approx(1.f + exp_2y), -2.f * softcap, softcap);
}

// One (Sq, Sk) matrix of a broadcast array: an item is read where its key exists.
template <typename Item>
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

  // Items of `row` from `key` on; what lies outside of the matrix comes as `outside`. Rows beyond Sq are computed and
  // not stored. kVec: as many neighbouring keys are read at once.
  template <bool kRagged, int kVec, int kItems>
  __device__ __forceinline__ void load(Item (&items)[kItems], int row, int key, Item outside) const {
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
};

// What a matrix has for a thread's scores, read four neighbouring keys at a time and before the products, whose time
// then covers the latency. The matrix has rows of neighbouring items, aligned to four, and less than 2^24 bytes from
// one row to the next: within a CTA's rows an offset has 32 bits.
template <typename Item, typename Fragment>
struct QuadItems {
  using Quad = Vec<Item, 4>;
  static constexpr int kQuads = Fragment::kNTiles / 2;

  Quad quad[Fragment::kMTiles][2][kQuads];

  // cta_row: the CTA's first row. What all its threads share makes a uniform base, with one register of offset per row.
  template <bool kRagged>
  __device__ __forceinline__ void load(const ScoreMatrix<Item>& matrix, int cta_row, int first_row, int first_key,
                                       Item outside) {
    const int first = first_key + Fragment::key_of(0);
    first_row = not_hoisted(first_row);  // the offsets would else wait in registers, and spill
    const uint32 row_bytes = static_cast<uint32>(matrix.row_stride * sizeof(Item));
    const auto* tile_g = reinterpret_cast<const char*>(matrix.items_g + cta_row * matrix.row_stride + first_key);
#pragma unroll
    for (int m = 0; m < Fragment::kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + Fragment::row_of(m, half);
        const char* row_g = tile_g + ((min(row, matrix.last_row) - cta_row) * row_bytes +
                                      Fragment::key_of(0) * static_cast<uint32>(sizeof(Item)));
#pragma unroll
        for (int n = 0; n < kQuads; n++) {
          const int key = Fragment::key_step(2 * n);
          if (!kRagged || first + key + 4 <= matrix.keys) {
            quad[m][half][n] = load_quad(row_g + key * sizeof(Item));
          } else {
            matrix.template load<true, 1>(quad[m][half][n].item, row, first + key, outside);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static Quad load_quad(const char* quad_g) {
    if constexpr (sizeof(Quad) == 16) {
      return __builtin_bit_cast(Quad, ld_global_v4(quad_g));
    } else if constexpr (sizeof(Quad) == 8) {
      return __builtin_bit_cast(Quad, ld_global_v2(quad_g));
    } else {
      return __builtin_bit_cast(Quad, ld_global_u32(quad_g));
    }
  }
};
struct NoItems {};

template <bool kQuads, typename Item, typename Fragment>
struct ItemsIfStruct {
  using Type = NoItems;
};
template <typename Item, typename Fragment>
struct ItemsIfStruct<true, Item, Fragment> {
  using Type = QuadItems<Item, Fragment>;
};
template <bool kQuads, typename Item, typename Fragment>
using ItemsIf = typename ItemsIfStruct<kQuads, Item, Fragment>::Type;

template <typename Bias, int kBiasVec, bool kMask, typename Slopes, bool kSoftcap, int kMaskVec = 1>
struct ScoreOptions {
  // Whether threads should hold quads of neighbouring keys, because some array is read four keys at a time.
  static constexpr bool kQuads = kBiasVec == 4 || kMaskVec == 4;
  // Whether the scores need a pass of their own before the exponential; without one the scale rides on its FMA.
  static constexpr bool kPass = kGiven<Bias> || kMask || kGiven<Slopes> || kSoftcap;

  static constexpr unsigned char kHidden = 0;  // of a mask

  const ScoreParams& params;
  const void *bias_g, *mask_g;
  int batch, head, cta_row, sq, sk;
  float softmax_scale;
  float slope = 0.f;
  int64 q_offset;

  __device__ __forceinline__ ScoreOptions(const AttentionParams& all, const void* bias, const void* mask,
                                          const void* slopes, const Place& place, int64 offset)
      : params(all.scores),
        bias_g(bias),
        mask_g(mask),
        batch(place.batch),
        head(place.head),
        cta_row(place.first_row),
        sq(all.sq),
        sk(all.sk),
        softmax_scale(all.softmax_scale),
        q_offset(offset) {
    if constexpr (kGiven<Slopes>) {
      const int64 at = batch * params.slopes_batch + head * params.slopes_head;
      slope = to_float(static_cast<const Slopes*>(slopes)[at]);
    }
  }

  // Whichever arrays are read four keys at a time.
  template <typename Fragment>
  struct Items {
    ItemsIf<kBiasVec == 4, Bias, Fragment> bias;
    ItemsIf<kMaskVec == 4, unsigned char, Fragment> mask;
  };

  // kRagged: the tile may reach beyond Sk.
  template <bool kRagged, typename Fragment>
  __device__ __forceinline__ void load(Items<Fragment>& items, int first_row, int first_key) const {
    if constexpr (kBiasVec == 4) {
      items.bias.template load<kRagged>(bias_matrix(), cta_row, first_row, first_key, from_float<Bias>(0.f));
    }
    if constexpr (kMaskVec == 4) {
      items.mask.template load<kRagged>(mask_matrix(), cta_row, first_row, first_key, kHidden);
    }
  }

  template <bool kRagged, typename Fragment>
  __device__ __forceinline__ void apply(Fragment& fragment, const Items<Fragment>& items, int first_row,
                                        int first_key) const {
    fragment.for_each_pair([&](float* pair, int, int) {
      pair[0] = kSoftcap ? softcapped(pair[0], params.softcap_in, params.softcap) : pair[0] * softmax_scale;
      pair[1] = kSoftcap ? softcapped(pair[1], params.softcap_in, params.softcap) : pair[1] * softmax_scale;
    });
    if constexpr (kGiven<Bias>) {
      for_each_item<kRagged, kBiasVec>(fragment, items.bias, bias_matrix(), from_float<Bias>(0.f), first_row, first_key,
                                       [](float& score, Bias bias) { score += to_float(bias); });
    }
    if constexpr (kGiven<Slopes>) {
      const float from = static_cast<float>(first_row + q_offset - first_key);
      fragment.for_each_pair([&](float* pair, int row, int key) {
        const float distance = from + static_cast<float>(row - key);
        pair[0] = __fmaf_rn(-slope, fabsf(distance), pair[0]);
        pair[1] = __fmaf_rn(-slope, fabsf(distance - 1.f), pair[1]);
      });
    }
    if constexpr (kMask) {
      for_each_item<kRagged, kMaskVec>(fragment, items.mask, mask_matrix(), kHidden, first_row, first_key,
                                       [](float& score, unsigned char attend) {
                                         if (!attend) score = -kInfinity;
                                       });
    }
  }

  // Without items loaded before.
  template <bool kRagged, typename Fragment>
  __device__ __forceinline__ void apply(Fragment& fragment, int first_row, int first_key) const {
    Items<Fragment> items;
    load<kRagged>(items, first_row, first_key);
    apply<kRagged>(fragment, items, first_row, first_key);
  }

 private:
  // body(score, item) for each score and what `matrix` has for it: loaded before into `items`, or now.
  template <bool kRagged, int kVec, typename Item, typename Fragment, typename Body>
  __device__ __forceinline__ static void for_each_item(Fragment& fragment, const QuadItems<Item, Fragment>& items,
                                                       const ScoreMatrix<Item>&, Item, int, int, Body body) {
#pragma unroll
    for (int m = 0; m < Fragment::kMTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int e = 0; e < 2 * Fragment::kNTiles; e++) {
          body(fragment.s[e / 2][m][2 * half + e % 2], items.quad[m][half][e / 4].item[e % 4]);
        }
      }
    }
  }
  template <bool kRagged, int kVec, typename Item, typename Fragment, typename Body>
  __device__ __forceinline__ static void for_each_item(Fragment& fragment, NoItems, const ScoreMatrix<Item>& matrix,
                                                       Item outside, int first_row, int first_key, Body body) {
    fragment.for_each_pair([&](float* pair, int row, int key) {
      Item items[2];
      matrix.template load<kRagged, kVec>(items, first_row + row, first_key + key, outside);
      body(pair[0], items[0]);
      body(pair[1], items[1]);
    });
  }

  __device__ __forceinline__ ScoreMatrix<Bias> bias_matrix() const {
    return {bias_g, params.bias, batch, head, sq, sk};
  }
  __device__ __forceinline__ ScoreMatrix<unsigned char> mask_matrix() const {
    return {mask_g, params.mask, batch, head, sq, sk};
  }
};
