// The query rows of a segment, and what becomes of a product of one of them with a key.
//
// Rows that share a key-value head lie side by side: row r is token r / group of head r % group of the group.
#pragma once

#include "../scores.cuh"
#include "params.cuh"

struct SegmentRows {
  const AttentionParams& params;
  int batch, kv_head, first, count;  // rows of the segment: the first of its head's rows, and how many

  __device__ __forceinline__ SegmentRows(const DecodeParams& all, int batch_, int index, int tile_rows)
      : params(all.attention),
        batch(batch_),
        kv_head(index / all.row_tiles),
        first(index % all.row_tiles * tile_rows),
        count(min(tile_rows, all.attention.group * all.attention.sq - first)) {}

  __device__ __forceinline__ int token(int row) const { return (first + row) / params.group; }
  __device__ __forceinline__ int head(int row) const { return kv_head * params.group + (first + row) % params.group; }

  template <typename Scalar>
  __device__ __forceinline__ const Scalar* q(const Scalar* q_g, int row) const {
    return head_rows(q_g, params.q, batch, head(row), token(row));
  }
};

// The rows of a lane: scores in units of log2. Rows beyond the segment are computed like its last, and not stored.
template <typename Options, int kRows>
struct LaneScores {
  using Rule = ScoreRule<Options, Unit::kLog2>;
  static constexpr bool kAlibi = kGiven<typename Options::Slopes>;

  const KeyWindow& window;
  int64 q_offset;
  int tokens[kRows];
  Rule rule;
  float slopes[kRows];

  template <typename RowOf>
  __device__ __forceinline__ LaneScores(const SegmentRows& rows, const KeyWindow& window_, const void* slopes_g,
                                        const Lengths& lengths, RowOf row_of)
      : window(window_),
        q_offset(query_offset(rows.params, lengths.q_offset_g, rows.batch)),
        rule(rows.params, slopes_g, rows.batch, rows.head(0)) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int row = min(row_of(i), rows.count - 1);
      tokens[i] = rows.token(row);
      if constexpr (kAlibi) slopes[i] = Rule(rows.params, slopes_g, rows.batch, rows.head(row)).slope;
    }
  }

  __device__ __forceinline__ float score(float product, int i, int key) {
    float score = rule.of_product(product);
    if constexpr (kAlibi) {
      rule.slope = slopes[i];
      score = rule.with_alibi(score, Distance(q_offset - key).plus(tokens[i], 0));
    }
    return score;
  }

  __device__ __forceinline__ bool sees(int i, int key) const { return window.of_row(tokens[i]).contains(key); }
};
