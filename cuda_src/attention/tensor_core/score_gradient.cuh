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

#include "../../common/pack.cuh"
#include "../modifiers.cuh"
#include "dropout.cuh"
#include "gradient_scale.cuh"
#include "resident_rows.cuh"
#include "row_statistics.cuh"
#include "score_items.cuh"

// The use of dS as the gradient of a bias: written where it is computed (kAccumulate: added to what is there), or
// kept for the caller.
template <typename Dtype_, bool kAccumulate_>
struct DbiasOptions {
  using Dtype = Dtype_;
  static constexpr bool kWritten = kGiven<Dtype>, kAccumulate = kAccumulate_;
};
struct KeptDbias {
  using Dtype = float;
  static constexpr bool kWritten = false;
};

struct OptionArrays {
  const void *bias_g, *mask_g, *slopes_g;
  void* dbias_g;
  Modifiers modifiers;
  ScaleArrays scales;
};

// A fragment's items, times `factor`, to an array of all scores, or added to what it holds: run by run.
template <typename Tile, typename Item>
__device__ __forceinline__ void store_scores(Item* array_g, const ScoreStrides& strides, const ScoreCoordinates& coords,
                                             const AttentionParams& params, const typename Tile::Fragment& items,
                                             float factor, bool accumulate) {
  const int first_row = Tile::row_of(0, 0, 0), first_key = Tile::key_of(0, 0, 0);
  Item* first_g = score_item(array_g, strides, coords, first_row, first_key);
  float sorted[Tile::kRuns][Tile::kRun];
  Tile::for_each([&](int n, int i, int e) {
    const int number = Tile::number(n, i, e);
    sorted[number / Tile::kRun][number % Tile::kRun] = items[n][i][e] * factor;
  });
  Tile::for_each([&](int n, int i, int e) {
    const int number = Tile::number(n, i, e);
    const int row = Tile::row_of(n, i, e), key = Tile::key_of(n, i, e);
    if (number % Tile::kRun != 0 || coords.first_row + row >= params.sq || coords.first_key + key >= params.sk) return;
    store_items(first_g + ((row - first_row) * strides.row + (key - first_key) * strides.key),
                sorted[number / Tile::kRun], accumulate);
  });
}

template <bool kMask>
struct MaskItem {
  using Type = void;
};
template <>
struct MaskItem<true> {
  using Type = unsigned char;
};

// The options of one tile. What they have for each score is loaded here: before the products, whose time then covers
// the latency. n, i, e are the tile's; rows and keys too.
template <typename Options_, typename Dbias_, typename Tile>
struct TileOptions {
  using Options = Options_;
  using Dbias = Dbias_;
  using Bias = typename Options::Bias;
  using Mask = typename MaskItem<Options::kMask>::Type;
  using Modifiers = typename Options::Modifiers;

  const BackwardParams& params;
  const KeyWindow& window;
  const OptionArrays& arrays;
  ScoreCoordinates coords;
  BackwardItems<Bias, Tile> bias;
  BackwardItems<Mask, Tile> mask;
  ScoreRule<Options, Unit::kLog2> rule;
  Distance distance;  // of the thread's first score
  // For values that leave the loop: dbias, and the arguments of score_mod's expression.
  const GradientScale& scale;

  __device__ __forceinline__ TileOptions(const BackwardParams& all, const KeyWindow& seen, const OptionArrays& options,
                                         const ScoreCoordinates& at, const GradientScale& scale_, int64 q_offset)
      : params(all),
        window(seen),
        arrays(options),
        coords(at),
        scale(scale_),
        bias(options.bias_g, all.attention.scores.bias, coords, all.attention),
        mask(options.mask_g, all.attention.scores.mask, coords, all.attention),
        rule(all.attention, options.slopes_g, coords.batch, coords.head),
        distance(coords.first_row + Tile::row_of(0, 0, 0) + q_offset - (coords.first_key + Tile::key_of(0, 0, 0))) {}

  __device__ __forceinline__ bool in_window(int n, int i, int e) const {
    // Beyond the last query score_mod gets the last one, and may be NaN if that one sees nothing.
    const int row = Modifiers::kScore ? indices(n, i, e).row : coords.first_row + Tile::row_of(n, i, e);
    return window.of_row(row).contains(coords.first_key + Tile::key_of(n, i, e));
  }

  // A score in base 2, before score_mod.
  __device__ __forceinline__ float score_log2(float product, int n, int i, int e) const {
    float s_log2 = rule.of_product(product);
    if constexpr (kGiven<Bias>) s_log2 = rule.with_bias(s_log2, to_float(bias.of(n, i, e)));
    if constexpr (kGiven<typename Options::Slopes>) {
      // Constants: the lane's part goes.
      const int rows = Tile::row_of(n, i, e) - Tile::row_of(0, 0, 0),
                keys = Tile::key_of(n, i, e) - Tile::key_of(0, 0, 0);
      s_log2 = rule.with_alibi(s_log2, distance.plus(rows, keys));
    }
    return s_log2;
  }

  // The exponent of P * 2^kShiftedLog2, for a row with statistic l. It is limited so that P <= 1. The limit is needed
  // because lse is float32: from scores of about 1e7 on its rounding alone can raise P above 4, which float16 cannot
  // hold with the boost. A NaN stays a NaN only where a bias or score_mod may cause it; fminf, which drops it, is one
  // instruction less. The limit costs one instruction a score; the modelled utilisation of the plain configurations
  // changes by 0.96 to 1.04, 1.00 on average (`python -m cupyattn turing`, T4, 2026-11-28).
  __device__ __forceinline__ float exponent(float product, int n, int i, int e, float l) const {
    if constexpr (!Options::kBeyondScale) {
      return fminf(__fmaf_rn(product, params.attention.scale_log2, -l), kShiftedLog2);
    }
    float s_log2 = score_log2(product, n, i, e);
    if constexpr (Modifiers::kScore) {
      const ScoreIndices at = indices(n, i, e);
      s_log2 = kLog2E * arrays.modifiers.score(kLn2 * s_log2, at.batch, at.head, at.row, at.key);
    }
    if constexpr (kGiven<Bias> || Modifiers::kScore) return at_most(s_log2 - l, kShiftedLog2);
    return fminf(s_log2 - l, kShiftedLog2);
  }

  // From the gradient of what score_mod makes of a score to that of the score.
  __device__ __forceinline__ float gradient(float product, float ds, int n, int i, int e) const {
    const ScoreIndices at = indices(n, i, e);
    const float score = kLn2 * score_log2(product, n, i, e);
    return arrays.modifiers.gradient(score, ds * scale.up, at.batch, at.head, at.row, at.key) * scale.down;
  }

  __device__ __forceinline__ bool attends(int n, int i, int e) const {
    const ScoreIndices at = indices(n, i, e);
    return arrays.modifiers.mask(at.batch, at.head, at.row, at.key);
  }

  // For all scores; those that are hidden have ds = 0.
  __device__ __forceinline__ void write_dbias(const typename Tile::Fragment& ds) const {
    store_scores<Tile>(static_cast<typename Dbias::Dtype*>(arrays.dbias_g), params.dbias, coords, params.attention, ds,
                       scale.up, Dbias::kAccumulate);
  }

 private:
  __device__ __forceinline__ ScoreIndices indices(int n, int i, int e) const {
    return {params.attention.sq,
            params.attention.sk,
            coords.batch,
            coords.head,
            coords.first_row + Tile::row_of(n, i, e),
            coords.first_key + Tile::key_of(n, i, e)};
  }
};

// Two P, times 2^(112 + kShiftedLog2) where float16 keeps them. kMayBeNan: a NaN stays one.
template <bool kMayBeNan>
__device__ __forceinline__ uint32 pack_weights(float x, float y) {
  if constexpr (kNarrowRange<DTYPE>) return pack_shifted<kMayBeNan>(x, y);
  return pack_pair<DTYPE>(x, y);
}

// `statistics` has l(n, i, e) and delta(n, i, e). `s` and `dp` come as products and are used up. `masked`: the window
// may hide some, `partial`: so may a block mask.
template <typename Tile, typename Options, typename Dbias, typename Statistics>
__device__ __forceinline__ void score_gradients(typename Tile::Packed& p, typename Tile::Packed& ds,
                                                typename Tile::Fragment& s, typename Tile::Fragment& dp,
                                                const Statistics& statistics,
                                                const TileOptions<Options, Dbias, Tile>& tile, bool masked,
                                                bool partial) {
  using Modifiers = typename Options::Modifiers;
  const ScoreParams& scores = tile.params.attention.scores;
  typename Tile::Packed kept;
  if constexpr (Options::kDropout) draw_kept<Tile>(kept, scores, tile.coords);

  Tile::for_each_pair([&](int n, int i, int half) {
    float shifted_p[2], slope[2] = {1.f, 1.f};
#pragma unroll
    for (int at = 0; at < 2; at++) {
      const int e = 2 * half + at;
      if (Options::kSoftcap) slope[at] = softcap_slope(s[n][i][e], scores);
      shifted_p[at] = ex2_approx(tile.exponent(s[n][i][e], n, i, e, statistics.l(n, i, e)));
      float unshift = kUnshifted;
      if (Options::kDropout) {
        const bool keeps = kept[n][i][half] >> (16 * at) & 1u;
        unshift = keeps ? kUnshifted * scores.keep_scale : 0.f;
      }
      dp[n][i][e] = shifted_p[at] * __fmaf_rn(dp[n][i][e], unshift, -statistics.delta(n, i, e));
      if constexpr (Modifiers::kScore) dp[n][i][e] = tile.gradient(s[n][i][e], dp[n][i][e], n, i, e);
    }
    p[n][i][half] = pack_weights < kGiven<typename Options::Bias> || Modifiers::kScore > (shifted_p[0], shifted_p[1]);
    if (Options::kDropout) p[n][i][half] &= kept[n][i][half];
    ds[n][i][half] = pack_pair<DTYPE>(dp[n][i][2 * half] * slope[0], dp[n][i][2 * half + 1] * slope[1]);
  });

  const auto hide = [&](int n, int i, int half, bool sees_first, bool sees_second) {
    const uint32 seen = halves_mask(sees_first, sees_second);
    p[n][i][half] &= seen;
    ds[n][i][half] &= seen;
    if constexpr (kGiven<typename Dbias::Dtype>) {
      if (!sees_first) dp[n][i][2 * half] = 0.f;
      if (!sees_second) dp[n][i][2 * half + 1] = 0.f;
    }
  };
  if (masked) {
    Tile::for_each_pair([&](int n, int i, int half) {
      hide(n, i, half, tile.in_window(n, i, 2 * half), tile.in_window(n, i, 2 * half + 1));
    });
  }
  if constexpr (Options::kMask) {
    Tile::for_each_pair([&](int n, int i, int half) {
      hide(n, i, half, tile.mask.of(n, i, 2 * half), tile.mask.of(n, i, 2 * half + 1));
    });
  }
  if constexpr (Modifiers::kMask) {
    if (!Modifiers::kBlocks || partial) {
      Tile::for_each_pair([&](int n, int i, int half) {
        hide(n, i, half, tile.attends(n, i, 2 * half), tile.attends(n, i, 2 * half + 1));
      });
    }
  }
  if constexpr (Dbias::kWritten) tile.write_dbias(dp);
}
