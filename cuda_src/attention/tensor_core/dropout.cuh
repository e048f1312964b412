// Dropout's mask for a tile of scores: the forward cuts it out of the packed probabilities of a warp, the backward
// keeps it as AND masks of packed fragments.
#pragma once

#include "../../common/pack.cuh"
#include "../../common/philox.cuh"
#include "score_items.cuh"

// A tile begins at a multiple of its length. Where that is a multiple of 32 keys, the four words of one Philox call
// serve the eight scores that a thread holds of one row in 32 keys: word n % 4 the pair of n8 tile n. Otherwise a tile
// may begin in the middle of 32 keys, not of 16, and a call serves four scores.
template <typename Tile>
__device__ __forceinline__ void drop(typename Tile::Packed& packed, const ScoreParams& params,
                                     const TileCoordinates& coords, int first_row, int first_key) {
  constexpr int kPairs = Tile::kNTiles % 4 == 0 ? 4 : 2;
  // Two fields in a word: the upper one is compared with the lower one still below it.
  const uint32 keep_from = params.keep_from << 16;
  static_assert(Tile::kKeys == Along::kN8 && Tile::kRun == 1, "a Philox call serves pairs of keys");
  __builtin_assume(first_key >= 0);    // otherwise a division by a power of two is more than a shift
  first_row = not_hoisted(first_row);  // otherwise what Philox makes of the rows alone waits in registers
#pragma unroll
  for (int n = 0; n < Tile::kNTiles; n += kPairs) {
    const int key = first_key + 8 * n;
    const bool upper = kPairs == 2 && key % 32 != 0;
#pragma unroll
    for (int i = 0; i < Tile::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < Tile::kHalves; half++) {
        const int row = first_row + Tile::row_of(n, i, 2 * half);
        const Philox4 words = dropout_words(params, coords.batch, coords.head, row, key + Tile::key_of(0, 0, 0));
#pragma unroll
        for (int pair = 0; pair < kPairs; pair++) {
          const uint32 word = upper ? words.word[(2 + pair) % 4] : words.word[pair];
          uint32& kept = packed[n + pair][i][half];
          if (word << 16 < keep_from) kept &= 0xffff0000u;
          if (word < keep_from) kept &= 0x0000ffffu;
        }
      }
    }
  }
}

// Queries along m16: as in the forward, the four words of a call serve the eight scores that a thread holds of one row
// in 32 keys.
template <typename Tile>
__device__ __forceinline__ void draw_kept_along_n(typename Tile::Packed& kept, const ScoreParams& params,
                                                  const ScoreCoordinates& coords) {
#pragma unroll
  for (int i = 0; i < Tile::kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; n += 2) {  // a tile may begin in the middle of 32 keys, not of 16
        const int key = coords.first_key + Tile::key_of(n, i, 0);
        const Philox4 words =
            dropout_words(params, coords.batch, coords.head, coords.first_row + Tile::row_of(n, i, 2 * half), key);
        const bool upper = key % 32 >= 16;
#pragma unroll
        for (int next = 0; next < 2; next++) {
          const uint32 word = upper ? words.word[2 + next] : words.word[next];
          kept[n + next][i][half] = halves_mask((word & 0xffffu) >= params.keep_from, (word >> 16) >= params.keep_from);
        }
      }
    }
  }
}

// Keys along m16: a thread holds every eighth key of two queries, so its keys have one parity and take one half of each
// word. The lanes of neighbouring keys share their calls: the even key's lane makes that of the first query, the odd
// key's lane that of the second, and each hands over the halves that the other needs.
template <typename Tile>
__device__ __forceinline__ void draw_kept_along_m(typename Tile::Packed& kept, const ScoreParams& params,
                                                  const ScoreCoordinates& coords) {
  constexpr int kLanesPerKey = 4;
  constexpr uint32 kLowHalves = 0x5410, kHighHalves = 0x7632;  // selectors of prmt
  const bool odd = lane_index() / kLanesPerKey % 2;
  const bool upper = Tile::kMTiles == 1 && coords.first_key % 32 >= 16;
#pragma unroll
  for (int n = 0; n < Tile::kNTiles; n++) {
    const int row = coords.first_row + Tile::along_n(n, odd);
    const int key = coords.first_key + Tile::along_m(0, 0);
    const Philox4 words = dropout_words(params, coords.batch, coords.head, row, key);
#pragma unroll
    for (int i = 0; i < Tile::kMTiles; i++) {  // words 2 i and 2 i + 1 serve keys 16 i + lane / 4 and 8 more
      const uint32 first = upper ? words.word[2] : words.word[2 * i];
      const uint32 second = upper ? words.word[3] : words.word[2 * i + 1];
      const uint32 mine = __byte_perm(first, second, odd ? kHighHalves : kLowHalves);
      const uint32 given = __byte_perm(first, second, odd ? kLowHalves : kHighHalves);
      const uint32 taken = __shfl_xor_sync(kFullWarp, given, kLanesPerKey);
      const uint32 of_first_row = odd ? taken : mine, of_second_row = odd ? mine : taken;
      kept[n][i][0] =
          halves_mask((of_first_row & 0xffffu) >= params.keep_from, (of_second_row & 0xffffu) >= params.keep_from);
      kept[n][i][1] = halves_mask((of_first_row >> 16) >= params.keep_from, (of_second_row >> 16) >= params.keep_from);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void draw_kept(typename Tile::Packed& kept, const ScoreParams& params,
                                          const ScoreCoordinates& coords) {
  static_assert(Tile::kRun == 1, "a Philox call serves pairs of keys");
  if constexpr (Tile::kKeys == Along::kM16) {
    draw_kept_along_m<Tile>(kept, params, coords);
  } else {
    draw_kept_along_n<Tile>(kept, params, coords);
  }
}
