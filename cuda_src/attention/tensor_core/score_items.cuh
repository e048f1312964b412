// The items of an array that broadcasts to all scores, a bias or a mask, for the scores that a thread holds.
#pragma once

#include "../scores.cuh"
#include "score_tile.cuh"

struct ScoreCoordinates {
  int batch, head, first_row, first_key;  // first_key is a multiple of 16, of 32 for 32 keys along m16
};

template <typename Item>
__device__ __forceinline__ Item* score_item(Item* array_g, const ScoreStrides& strides, const ScoreCoordinates& coords,
                                            int row, int key) {
  return array_g + coords.batch * strides.batch + coords.head * strides.head + (coords.first_row + row) * strides.row +
         (coords.first_key + key) * strides.key;
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

// Runs of neighbouring keys, each read at once, and before the products, whose time then covers the latency. They stay
// packed until they are used: unpacked at once, they would be waited for at once.
template <typename Item, typename Tile>
struct RunsAhead {
  static constexpr int kItemBits = 8 * sizeof(Item);
  static constexpr int kRunBytes = Tile::kRun * sizeof(Item);
  static constexpr int kWords = div_up(kRunBytes, 4);

  uint32 runs[Tile::kRuns][kWords];

  // load_run(run, n, i, e) for the run whose first score this is, if there is one.
  template <typename LoadRun>
  __device__ __forceinline__ void load_at(int n, int i, int e, LoadRun load_run) {
    const int number = Tile::number(n, i, e);
    if (number % Tile::kRun == 0) load_run(runs[number / Tile::kRun], n, i, e);
  }

  __device__ __forceinline__ Item of(int n, int i, int e) const {
    const int number = Tile::number(n, i, e), bit = number % Tile::kRun * kItemBits;
    const uint32 bits = runs[number / Tile::kRun][bit / 32] >> (bit % 32);
    if constexpr (sizeof(Item) == 4) return __builtin_bit_cast(Item, bits);
    if constexpr (sizeof(Item) == 2) return __builtin_bit_cast(Item, static_cast<uint16>(bits));
    if constexpr (sizeof(Item) == 1) return __builtin_bit_cast(Item, static_cast<unsigned char>(bits));
  }
};

template <typename Tile>
struct RunsAhead<void, Tile> {};

// For the forward: an array that is read four keys at a time is read ahead, any other when it is used.
template <typename Item, typename Tile>
struct ForwardRuns : RunsAhead<Item, Tile> {
  using Runs = RunsAhead<Item, Tile>;

  // cta_row: the CTA's first row. What all its threads share makes a uniform base, with one register of offset per row:
  // the matrix has less than 2^24 bytes from one row to the next, so within a CTA's rows an offset has 32 bits.
  template <bool kRagged>
  __device__ __forceinline__ void load(const ScoreMatrix<Item>& matrix, int cta_row, int first_row, int first_key) {
    first_row = not_hoisted(first_row);  // the offsets would otherwise wait in registers, and spill
    const uint32 row_bytes = static_cast<uint32>(matrix.row_stride * sizeof(Item));
    const auto* tile_g = reinterpret_cast<const char*>(matrix.items_g + cta_row * matrix.row_stride + first_key);
    const auto load_run = [&](uint32(&run)[Runs::kWords], int n, int i, int e) {
      const int row = first_row + Tile::row_of(n, i, e), key = first_key + Tile::key_of(n, i, e);
      const char* row_g = tile_g + ((min(row, matrix.last_row) - cta_row) * row_bytes +
                                    Tile::key_of(0, 0, 0) * static_cast<uint32>(sizeof(Item)));
      if (!kRagged || key + Tile::kRun <= matrix.keys) {
        load_words<Runs::kRunBytes>(run, row_g + Tile::key_step(n, e) * sizeof(Item));
      } else {
        Vec<Item, Tile::kRun> items;
        matrix.template load<true, 1>(items.item, row, key);
        memcpy(run, &items, sizeof(items));
      }
    };
    Tile::for_each_pair_by_row([&](int n, int i, int half) { Runs::load_at(n, i, 2 * half, load_run); });
  }

  template <typename Body>
  __device__ __forceinline__ void for_each(Scores<Tile>& scores, Body body) const {
    Tile::for_each_pair_by_row([&](int n, int i, int half) {
      body(scores.s[n][i][2 * half], Runs::of(n, i, 2 * half));
      body(scores.s[n][i][2 * half + 1], Runs::of(n, i, 2 * half + 1));
    });
  }
};

template <typename Pass, typename Tile>
struct ForwardItems {
  static constexpr bool kBiasAhead = Pass::kBiasVec == 4, kMaskAhead = Pass::kMaskVec == 4;

  ForwardRuns<typename Pass::Bias, Tile> bias;
  ForwardRuns<unsigned char, Tile> mask;

  template <bool kRagged>
  __device__ __forceinline__ void load(const Pass& pass, int first_row, int first_key) {
    if constexpr (kBiasAhead) bias.template load<kRagged>(pass.bias(), pass.cta_row, first_row, first_key);
    if constexpr (kMaskAhead) mask.template load<kRagged>(pass.mask(), pass.cta_row, first_row, first_key);
  }

  template <bool kRagged, typename Body>
  __device__ __forceinline__ void for_each_bias(const Pass& pass, Scores<Tile>& scores, int first_row, int first_key,
                                                Body body) const {
    if constexpr (kBiasAhead) {
      bias.for_each(scores, body);
    } else {
      ItemsInPlace().for_each_bias<kRagged>(pass, scores, first_row, first_key, body);
    }
  }
  template <bool kRagged, typename Body>
  __device__ __forceinline__ void for_each_mask(const Pass& pass, Scores<Tile>& scores, int first_row, int first_key,
                                                Body body) const {
    if constexpr (kMaskAhead) {
      mask.for_each(scores, body);
    } else {
      ItemsInPlace().for_each_mask<kRagged>(pass, scores, first_row, first_key, body);
    }
  }
};

// For the backward, zeros where their query or key does not exist: read run by run when this is made, or one by one.
template <typename Item, typename Tile, bool kAhead = (Tile::kRun > 1)>
struct BackwardItems {
  const Item* first_g;  // the thread's first
  const ScoreStrides& strides;
  ScoreCoordinates coords;
  int sq, sk;

  __device__ __forceinline__ BackwardItems(const void* items_g, const ScoreStrides& items_strides,
                                           const ScoreCoordinates& items_coords, const AttentionParams& params)
      : first_g(score_item(static_cast<const Item*>(items_g), items_strides, items_coords, Tile::row_of(0, 0, 0),
                           Tile::key_of(0, 0, 0))),
        strides(items_strides),
        coords(items_coords),
        sq(params.sq),
        sk(params.sk) {}

  __device__ __forceinline__ Item of(int n, int i, int e) const {
    const int row = Tile::row_of(n, i, e), key = Tile::key_of(n, i, e);
    const bool exists = coords.first_row + row < sq && coords.first_key + key < sk;
    // Constants: the lane's part goes.
    const int rows = row - Tile::row_of(0, 0, 0), keys = key - Tile::key_of(0, 0, 0);
    return exists ? first_g[rows * strides.row + keys * strides.key] : Item();
  }
};

// A run exists or not: Sk is a multiple of four.
template <typename Item, typename Tile>
struct BackwardItems<Item, Tile, true> : RunsAhead<Item, Tile> {
  using Runs = RunsAhead<Item, Tile>;

  __device__ __forceinline__ BackwardItems(const void* items_g, const ScoreStrides& strides,
                                           const ScoreCoordinates& coords, const AttentionParams& params) {
    const int first_row = Tile::row_of(0, 0, 0), first_key = Tile::key_of(0, 0, 0);
    const Item* first_g = score_item(static_cast<const Item*>(items_g), strides, coords, first_row, first_key);
    const auto load_run = [&](uint32(&run)[Runs::kWords], int n, int i, int e) {
      const int row = Tile::row_of(n, i, e), key = Tile::key_of(n, i, e);
#pragma unroll
      for (int word = 0; word < Runs::kWords; word++) run[word] = 0;
      if (coords.first_row + row < params.sq && coords.first_key + key < params.sk) {
        // Constants: the lane's part goes.
        load_words<Runs::kRunBytes>(run, first_g + (row - first_row) * strides.row + (key - first_key));
      }
    };
    Tile::for_each([&](int n, int i, int e) { Runs::load_at(n, i, e, load_run); });
  }
};

// For an array that is not given.
struct NoItems {
  __device__ __forceinline__ NoItems(const void*, const ScoreStrides&, const ScoreCoordinates&,
                                     const AttentionParams&) {}
};
template <typename Tile>
struct BackwardItems<void, Tile, false> : NoItems {
  using NoItems::NoItems;
};
template <typename Tile>
struct BackwardItems<void, Tile, true> : NoItems {
  using NoItems::NoItems;
};
