// Dropout of a warp's probabilities in plain registers (score_tile.cuh).
#pragma once

#include "../../common/philox.cuh"
#include "../params.cuh"
#include "score_tile.cuh"

// The words of one Philox call serve a thread's pairs of one row, word n % 4 that of pair n.
template <typename Scores>
__device__ __forceinline__ void drop(Scores& scores, const ScoreParams& params, const Place& place, int first_row,
                                     int first_key) {
  const int key = first_key + Scores::key_of(0);
  const bool upper = Scores::kPairs == 2 && key % 32 >= 16;
#pragma unroll
  for (int i = 0; i < Scores::kRows; i++) {
    const Philox4 words = dropout_words(params, place.batch, place.head, first_row + Scores::row_of(i), key);
#pragma unroll
    for (int n = 0; n < Scores::kPairs; n++) {
      const uint32 word = upper ? words.word[(n + 2) % 4] : words.word[n];
      if ((word & 0xffffu) < params.keep_from) scores.s[i][2 * n] = 0.f;
      if ((word >> 16) < params.keep_from) scores.s[i][2 * n + 1] = 0.f;
    }
  }
}
