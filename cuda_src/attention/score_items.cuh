// What an array that broadcasts to all scores, a bias or a mask, has for the scores that a thread holds: one load for
// each run of neighbouring keys (ScoreGrid), made before the products, whose time then covers the latency.
#pragma once

#include "../common/vec.cuh"
#include "params.cuh"
#include "score_grid.cuh"

struct ScorePlace {
  int batch, head, first_row, first_key;  // first_key is a multiple of 16, of 32 for 32 keys along m16
};

template <typename Item>
__device__ __forceinline__ Item* score_item(Item* array_g, const ScoreStrides& strides, const ScorePlace& place,
                                            int row, int key) {
  return array_g + place.batch * strides.batch + place.head * strides.head + (place.first_row + row) * strides.row +
         (place.first_key + key) * strides.key;
}

// 1, 2, 4, 8 or 16 bytes, in one load that nothing sinks or splits, as words.
template <int kBytes, int kWords>
__device__ __forceinline__ void load_words(uint32 (&words)[kWords], const void* source_g) {
  if constexpr (kBytes == 16) {
    const uint4 v = ld_global_v4(source_g);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = ld_global_v2(source_g);
    words[0] = v.x, words[1] = v.y;
  } else if constexpr (kBytes == 4) {
    words[0] = ld_global_u32(source_g);
  } else if constexpr (kBytes == 2) {
    words[0] = *static_cast<const uint16*>(source_g);
  } else {
    words[0] = *static_cast<const unsigned char*>(source_g);
  }
}

// Items are zeros where their query or key does not exist.
template <typename Item, typename Grid, bool kAhead = (Grid::kRun > 1)>
struct ScoreItems;

// Read one by one, when they are used.
template <typename Item, typename Grid>
struct ScoreItems<Item, Grid, false> {
  const Item* array_g;
  const ScoreStrides& strides;
  ScorePlace place;
  int sq, sk;

  __device__ __forceinline__ ScoreItems(const void* items_g, const ScoreStrides& items_strides,
                                        const ScorePlace& items_place, const AttentionParams& params)
      : array_g(static_cast<const Item*>(items_g)),
        strides(items_strides),
        place(items_place),
        sq(params.sq),
        sk(params.sk) {}

  __device__ __forceinline__ Item of(int n, int i, int e) const {
    const int row = Grid::row_of(n, i, e), key = Grid::key_of(n, i, e);
    const bool exists = place.first_row + row < sq && place.first_key + key < sk;
    return exists ? *score_item(array_g, strides, place, row, key) : Item();
  }
};

// Read run by run, when this is made. They stay packed until they are used: unpacked at once, they would be waited for
// at once. A run exists or not: Sk is a multiple of four.
template <typename Item, typename Grid>
struct ScoreItems<Item, Grid, true> {
  static constexpr int kItemBits = 8 * sizeof(Item);
  static constexpr int kRunBytes = Grid::kRun * sizeof(Item);
  static constexpr int kWords = div_up(kRunBytes, 4);

  uint32 runs[Grid::kRuns][kWords];

  __device__ __forceinline__ ScoreItems(const void* items_g, const ScoreStrides& strides, const ScorePlace& place,
                                        const AttentionParams& params) {
    Grid::for_each([&](int n, int i, int e) {
      const int number = Grid::number(n, i, e);
      if (number % Grid::kRun != 0) return;
      uint32(&run)[kWords] = runs[number / Grid::kRun];
#pragma unroll
      for (int word = 0; word < kWords; word++) run[word] = 0;
      const int row = Grid::row_of(n, i, e), key = Grid::key_of(n, i, e);
      if (place.first_row + row < params.sq && place.first_key + key < params.sk) {
        load_words<kRunBytes>(run, score_item(static_cast<const Item*>(items_g), strides, place, row, key));
      }
    });
  }

  __device__ __forceinline__ Item of(int n, int i, int e) const {
    const int number = Grid::number(n, i, e), bit = number % Grid::kRun * kItemBits;
    const uint32 bits = runs[number / Grid::kRun][bit / 32] >> (bit % 32);
    if constexpr (sizeof(Item) == 4) return __builtin_bit_cast(Item, bits);
    if constexpr (sizeof(Item) == 2) return __builtin_bit_cast(Item, static_cast<uint16>(bits));
    if constexpr (sizeof(Item) == 1) return __builtin_bit_cast(Item, static_cast<unsigned char>(bits));
  }
};

// Of an array that is not given.
struct NoScoreItems {
  __device__ __forceinline__ NoScoreItems(const void*, const ScoreStrides&, const ScorePlace&, const AttentionParams&) {
  }
};
template <typename Grid>
struct ScoreItems<void, Grid, false> : NoScoreItems {
  using NoScoreItems::NoScoreItems;
};
template <typename Grid>
struct ScoreItems<void, Grid, true> : NoScoreItems {
  using NoScoreItems::NoScoreItems;
};
