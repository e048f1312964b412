// From a tile of products q . k and dout . v to P and dS, packed for the tensor cores (FlashAttention, Dao et al.,
// arXiv:2205.14135, appendix B.2):
//
//   s = softmax_scale * q . k, or softcap * tanh(.) of it, + bias + ALiBi;   P = exp(s - lse), 0 where masked
//   dS = P * (dP - delta), with dropout P * (kept / (1 - p) * dP - delta);   dbias = dS;   then dS *= 1 - tanh^2
//
// Each option is a compile-time switch; an absent array's dtype is void. What is hidden is cut out of the packed
// results, not out of the scores: so a NaN in a row's statistics reaches the keys that the row sees, and no other. (It
// reaches dQ and dK always; dV, where P alone counts, if there is a bias, which may hold NaN on purpose.)
#pragma once

#include "../common/pack.cuh"
#include "kept_scores.cuh"
#include "resident_rows.cuh"
#include "row_statistics.cuh"
#include "score_options.cuh"

template <bool kMask>
struct MaskItem {
  using Type = void;
};
template <>
struct MaskItem<true> {
  using Type = unsigned char;
};

// kDbiasAdd: terms are added atomically, several to an item; kDbiasAccumulate: each to what its own item holds.
template <typename Bias_, bool kMask_, typename Slopes_, bool kSoftcap_, bool kDropout_, typename Dbias_,
          bool kDbiasAdd_, bool kDbiasAccumulate_>
struct GradientOptions {
  using Bias = Bias_;
  using Mask = typename MaskItem<kMask_>::Type;
  using Slopes = Slopes_;
  using Dbias = Dbias_;
  static constexpr bool kMask = kMask_, kSoftcap = kSoftcap_, kDropout = kDropout_;
  static constexpr bool kDbiasAdd = kDbiasAdd_, kDbiasAccumulate = kDbiasAccumulate_;
  // Without a pass of their own over the scores, the scale rides on the exponential's FMA.
  static constexpr bool kPass = kGiven<Bias> || kGiven<Slopes> || kSoftcap;
};

struct OptionArrays {
  const void *bias_g, *mask_g, *slopes_g;
  void* dbias_g;
};

// The options of one tile. What they have for each score is loaded here: before the products, whose time then covers
// the latency. n, i, e are the grid's; rows and keys, the tile's.
template <typename Options, typename Grid>
struct ScoreTile {
  using Bias = typename Options::Bias;
  using Slopes = typename Options::Slopes;

  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  ScorePlace place;
  ScoreItems<Bias, Grid> bias;
  ScoreItems<typename Options::Mask, Grid> mask;
  float slope_log2, distance;  // ALiBi: of the head, and of the thread's first score

  __device__ __forceinline__ ScoreTile(const BackwardParams& all, const KeyWindow& seen, const OptionArrays& options,
                                       const ScorePlace& at, int64 q_offset)
      : params(all),
        window(seen),
        arrays(options),
        place(at),
        bias(options.bias_g, all.attention.scores.bias, place, all.attention),
        mask(options.mask_g, all.attention.scores.mask, place, all.attention) {
    const ScoreParams& scores = params.attention.scores;
    if constexpr (kGiven<Slopes>) {
      const int64 item = place.batch * scores.slopes_batch + place.head * scores.slopes_head;
      slope_log2 = to_float(static_cast<const Slopes*>(arrays.slopes_g)[item]) * kLog2E;
      distance = static_cast<float>(place.first_row + q_offset - place.first_key + behind(0, 0, 0));
    }
  }

  __device__ __forceinline__ bool in_window(int n, int i, int e) const {
    return window.of_row(place.first_row + Grid::row_of(n, i, e)).contains(place.first_key + Grid::key_of(n, i, e));
  }

  __device__ __forceinline__ static int behind(int n, int i, int e) {
    return Grid::row_of(n, i, e) - Grid::key_of(n, i, e);
  }

  // The exponent of P * 2^kShiftedLog2, for a row with statistic l.
  __device__ __forceinline__ float exponent(float product, int n, int i, int e, float l) const {
    const ScoreParams& scores = params.attention.scores;
    if constexpr (!Options::kPass) return __fmaf_rn(product, params.attention.scale_log2, -l);
    float s_log2 = Options::kSoftcap ? softcapped(product, scores.softcap_in, scores.softcap * kLog2E)
                                     : product * params.attention.scale_log2;
    if constexpr (kGiven<Bias>) s_log2 = __fmaf_rn(to_float(bias.of(n, i, e)), kLog2E, s_log2);
    if constexpr (kGiven<Slopes>) {
      const int from_first = behind(n, i, e) - behind(0, 0, 0);  // a constant: the lane's part goes
      s_log2 = __fmaf_rn(-slope_log2, fabsf(distance + static_cast<float>(from_first)), s_log2);
    }
    // Scores beyond 1e7 leave no digits to lse: P is held to 1. (Those of products alone are not that large.)
    if constexpr (kGiven<Bias>) return at_most(s_log2 - l, kShiftedLog2);  // a NaN stays one
    if constexpr (kGiven<Slopes>) return fminf(s_log2 - l, kShiftedLog2);
    return s_log2 - l;
  }

  // d(softcap * tanh(y)) / dy / softcap = 1 - tanh^2 y = 4 r (1 - r) with r = 1 / (1 + exp(2 y)).
  __device__ __forceinline__ float softcap_slope(float product) const {
    const float r = rcp_approx(1.f + ex2_approx(product * params.attention.scores.softcap_in));
    return 4.f * __fmaf_rn(-r, r, r);
  }

  // Of all scores; those that are hidden have ds = 0.
  __device__ __forceinline__ void write_dbias(const typename Grid::Fragment& ds) const {
    using Dbias = typename Options::Dbias;
    float sorted[Grid::kRuns][Grid::kRun];
    Grid::for_each([&](int n, int i, int e) {
      const int number = Grid::number(n, i, e);
      sorted[number / Grid::kRun][number % Grid::kRun] = ds[n][i][e];
    });
    Grid::for_each([&](int n, int i, int e) {
      const int number = Grid::number(n, i, e);
      const int row = Grid::row_of(n, i, e), key = Grid::key_of(n, i, e);
      const bool exists = place.first_row + row < params.attention.sq && place.first_key + key < params.attention.sk;
      if ((!Options::kDbiasAdd && number % Grid::kRun != 0) || !exists) return;
      Dbias* item_g = score_item(static_cast<Dbias*>(arrays.dbias_g), params.dbias, place, row, key);
      if constexpr (Options::kDbiasAdd) {
        if (ds[n][i][e] != 0.f) atomicAdd(item_g, ds[n][i][e]);
      } else {
        store_items(item_g, sorted[number / Grid::kRun], Options::kDbiasAccumulate);
      }
    });
  }
};

// `statistics` has l(n, i, e) and delta(n, i, e). `s` and `dp` come as products and are used up.
template <typename Grid, typename Options, typename Statistics>
__device__ __forceinline__ void score_gradients(typename Grid::Packed& p, typename Grid::Packed& ds,
                                                typename Grid::Fragment& s, typename Grid::Fragment& dp,
                                                const Statistics& statistics, const ScoreTile<Options, Grid>& tile,
                                                bool masked) {
  typename Grid::Packed kept;
  if constexpr (Options::kDropout) draw_kept<Grid>(kept, tile.params.attention.scores, tile.place);

  Grid::for_each_pair([&](int n, int i, int half) {
    float shifted_p[2], slope[2] = {1.f, 1.f};
#pragma unroll
    for (int at = 0; at < 2; at++) {
      const int e = 2 * half + at;
      if (Options::kSoftcap) slope[at] = tile.softcap_slope(s[n][i][e]);
      shifted_p[at] = ex2_approx(tile.exponent(s[n][i][e], n, i, e, statistics.l(n, i, e)));
      float unshift = kUnshifted;
      if (Options::kDropout) {
        const bool keeps = kept[n][i][half] >> (16 * at) & 1u;
        unshift = keeps ? kUnshifted * tile.params.attention.scores.keep_scale : 0.f;
      }
      dp[n][i][e] = shifted_p[at] * __fmaf_rn(dp[n][i][e], unshift, -statistics.delta(n, i, e));
    }
    p[n][i][half] = pack_shifted<kGiven<typename Options::Bias>>(shifted_p[0], shifted_p[1]);
    if (Options::kDropout) p[n][i][half] &= kept[n][i][half];
    ds[n][i][half] = pack_halves(dp[n][i][2 * half] * slope[0], dp[n][i][2 * half + 1] * slope[1]);
  });

  const auto hide = [&](int n, int i, int half, bool sees_first, bool sees_second) {
    const uint32 seen = halves_mask(sees_first, sees_second);
    p[n][i][half] &= seen;
    ds[n][i][half] &= seen;
    if constexpr (kGiven<typename Options::Dbias>) {
      if (!sees_first) dp[n][i][2 * half] = 0.f;
      if (!sees_second) dp[n][i][2 * half + 1] = 0.f;
    }
  };
  if (masked) {
    Grid::for_each_pair([&](int n, int i, int half) {
      hide(n, i, half, tile.in_window(n, i, 2 * half), tile.in_window(n, i, 2 * half + 1));
    });
  }
  if constexpr (Options::kMask) {
    Grid::for_each_pair([&](int n, int i, int half) {
      hide(n, i, half, tile.mask.of(n, i, 2 * half), tile.mask.of(n, i, 2 * half + 1));
    });
  }
  if constexpr (kGiven<typename Options::Dbias>) tile.write_dbias(dp);
}
