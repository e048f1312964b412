// Dropout of the packed probabilities of one warp and one key tile.
#pragma once

#include "../common/philox.cuh"
#include "lean_softmax.cuh"
#include "params.cuh"

// A tile begins at a multiple of its length. Where that is a multiple of 32 keys, the four words of one Philox call
// serve the eight scores that a thread holds of one row in 32 keys: word n % 4 the pair of n8 tile n. Else a tile may
// begin in the middle of 32 keys, not of 16, and a call serves four scores.
template <typename Fragment>
__device__ __forceinline__ void drop(PackedProbabilities<Fragment>& packed, const ScoreParams& params,
                                     const Place& place, int first_row, int first_key) {
  constexpr int kPairs = Fragment::kNTiles % 4 == 0 ? 4 : 2;
  // Two fields in a word: the upper one is compared with the lower one still behind it.
  const uint32 keep_from = params.keep_from << 16;
  __builtin_assume(first_key >= 0);    // else a division by a power of two is more than a shift
  first_row = not_hoisted(first_row);  // else what Philox makes of the rows alone waits in registers, and spills
#pragma unroll
  for (int n = 0; n < Fragment::kNTiles; n += kPairs) {
    const int key = first_key + 8 * n;
    const bool upper = kPairs == 2 && key % 32 != 0;
#pragma unroll
    for (int i = 0; i < Fragment::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + Fragment::row_of(i, half);
        const Philox4 words = dropout_words(params.seed, place.batch, place.head, row, key + Fragment::key_of(0));
#pragma unroll
        for (int pair = 0; pair < kPairs; pair++) {
          const uint32 word = upper ? words.word[(2 + pair) % 4] : words.word[pair];
          uint32& kept = packed.p[n + pair][i][half];
          if (word << 16 < keep_from) kept &= 0xffff0000u;
          if (word < keep_from) kept &= 0x0000ffffu;
        }
      }
    }
  }
}
