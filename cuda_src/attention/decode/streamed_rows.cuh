// Rows of head dims above 256 on tensor cores: as tensor_core_rows.cuh, but with parts of the rows of K and V on the
// way instead of whole tiles, of which not one would fit in registers next to the accumulator.
//
// A part is 128 bytes of each of the tile's 16 rows: 16 registers of a lane, in four loads, of K as of V. The parts of
// K, then those of V, then those of the next tile pass through kSlots slots: where one was multiplied, the one kSlots
// later is loaded. Query rows are 64 registers too; they lie in shared memory as the products take them, once for all
// warps, and 16 loads a tile bring them, where K and V take 64.
//
// Slot number is part number modulo kSlots in every tile, so that all of them are registers.
#pragma once

#include "tensor_core_rows.cuh"

template <typename Scalar, typename Item, int kHeadDim, int kSlots_>
struct StreamedRows : TensorCoreRows<Scalar, Item, kHeadDim, 8, 1> {
  using Base = TensorCoreRows<Scalar, Item, kHeadDim, 8, 1>;
  using Base::acc;
  using Base::bias;
  using Base::kColumnTiles;
  using Base::kScaled;
  using Base::kUnitWords;
  using Base::operand;
  using Base::s;
  using typename Base::Format;
  using typename Base::KeyWords;
  using typename Base::Tile;

  static constexpr bool kStreams = true;
  static constexpr int kSlots = kSlots_;
  static constexpr int kPartBytes = 128, kPartItems = 8 * kPartBytes / Format::kBits;
  static constexpr int kParts = kHeadDim / kPartItems, kSteps = 2 * kParts;  // steps of a tile: K's parts, then V's
  static constexpr int kQueryUnits = kHeadDim / 32;                          // a lane has 8 items of each
  static_assert(kParts * kPartItems == kHeadDim, "whole parts");
  static_assert(kSteps % kSlots == 0, "a tile begins at slot 0");

  // In shared memory: lane by lane what four products with one unit of K take.
  struct Queries {
    alignas(16) uint4 units[kQueryUnits][kWarpSize];
  };

  // Both tiles of one position.
  struct KeysAndValues {
    Tile k, v;
  };

  uint32 slot[kSlots][16];
  float k_scale[2], v_scale[2];
  uint32 q_s;  // of this lane

  // Every warp brings some units of q. The caller waits for all of them, then calls `start`.
  template <int kWarps>
  __device__ __forceinline__ void begin(const SegmentRows& rows, const Scalar* q_g, Queries& queries) {
    constexpr int kPieceUnits = KeyWords::kPiece / kUnitWords, kItems = 32 / Format::kBits;
    q_s = shared_address(&queries.units[0][lane_index()]);
    const int row = Base::g();
    const Scalar* row_g = rows.q(q_g, min(row, rows.count - 1));
#pragma unroll
    for (int i = 0; i < div_up(kQueryUnits, kWarps); i++) {
      const int unit = i * kWarps + warp_index();
      if (unit >= kQueryUnits) continue;
      const int first = KeyWords::offset_of(unit / kPieceUnits, Base::t()) * kItems + unit % kPieceUnits * 8;
      uint4 items = make_uint4(0, 0, 0, 0);
      if (row < rows.count) items = ld_global_v4(reinterpret_cast<const void*>(row_g + first));
      uint32 words[4] = {items.x, items.y, items.z, items.w};
      Format::queries(words);
      queries.units[unit][lane_index()] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    Base::clear_sums(0);
    if constexpr (kScaled) {
      operand = kept_in_register(Format::kOperand);
      Base::begin_units();
    }
  }

  // What the products need of q besides.
  __device__ __forceinline__ void prepare() {
    if constexpr (Format::kBias != 0) {
      float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int u = 0; u < kQueryUnits; u++) {
        uint32 q[4];
        load_queries(q, u);
#pragma unroll
        for (int x = 0; x < 4; x++) Base::template subtract_bias<Format::kBias>(sums, q[x]);
      }
      bias[0][0] = sums[0];
      bias[0][1] = sums[1];
    }
  }

  // The first parts of the first tile.
  __device__ __forceinline__ void start(const KeysAndValues& tile) {
#pragma unroll
    for (int step = 0; step < kSlots; step++) load(step, tile);
    load_scales(k_scale, tile.k);
    load_scales(v_scale, tile.v);
  }

  __device__ __forceinline__ void multiply_keys(const KeysAndValues& tile, const KeysAndValues& next, bool more) {
    float even[4], odd[4];  // two chains: half the latency
#pragma unroll
    for (int e = 0; e < 4; e++) {
      even[e] = Format::kBias != 0 ? bias[0][e % 2] : 0.f;
      odd[e] = 0.f;
    }
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const uint32(&words)[16] = slot[part % kSlots];
      constexpr int kPartUnits = 8 / kUnitWords;
#pragma unroll
      for (int i = 0; i < kPartUnits; i++) {
        uint32 q[4], keys[2][4];
        load_queries(q, part * kPartUnits + i);
#pragma unroll
        for (int half = 0; half < 2; half++) Format::keys(keys[half], words + 8 * half + i * kUnitWords, operand);
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const uint32 a[2] = {keys[0][x], keys[1][x]};
          mma_m16n8k8<Scalar>(x % 2 == 0 ? even : odd, a, q[x]);
        }
      }
      load_later(part, tile, next, more);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[0][e] = __fmaf_rn(odd[e], Format::kOdd, even[e]);
      if constexpr (kScaled) s[0][e] *= k_scale[e / 2] * Format::kKeyUnit;
    }
    if (more) load_scales(k_scale, next.k);
  }

  // acc += P V, with P in place of the scores; at an edge rows of V from `keys` on are zeros (tensor_core_rows.cuh).
  __device__ __forceinline__ void add_values(const KeysAndValues& tile, const KeysAndValues& next, bool more, bool edge,
                                             int keys) {
    if constexpr (kScaled) {
      if (edge) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (Base::key_of(half) >= keys) v_scale[half] = 0.f;
        }
      }
      Base::scale_weights(v_scale);
      if (more) load_scales(v_scale, next.v);
    }
    uint32 p[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      p[half] = movmatrix_trans(pack_pair<Scalar>(s[0][2 * half], s[0][2 * half + 1]));
      if constexpr (Format::kValueBias != 0) {
        Base::template subtract_bias<Format::kValueBias>(this->value_bias[0], p[half]);
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      uint32(&words)[16] = slot[(kParts + part) % kSlots];
      if (!kScaled && edge) clear_rows(words, keys);
      constexpr int kPartUnits = 4 / kUnitWords;
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < kPartUnits; i++) {
          uint32 columns[8];
          Format::values(columns, words + 8 * half + i * kUnitWords, words + 8 * half + 4 + i * kUnitWords, operand);
#pragma unroll
          for (int x = 0; x < 4; x++) {
            const uint32 a[2] = {columns[2 * x], columns[2 * x + 1]};
            mma_m16n8k8<Scalar>(acc[0][4 * (part * kPartUnits + i) + x], a, p[half]);
          }
        }
      }
      load_later(kParts + part, tile, next, more);
    }
  }

 private:
  __device__ __forceinline__ void load_queries(uint32 (&q)[4], int unit) const {
    const uint4 four = ld_shared_v4(q_s + unit * (kWarpSize * 16));
    q[0] = four.x, q[1] = four.y, q[2] = four.z, q[3] = four.w;
  }

  // The part of a step to its slot: of K 8 words each of rows g and g + 8, of V 4 words each of rows 8 half + 2 t + e.
  __device__ __forceinline__ void load(int step, const KeysAndValues& tile) {
    uint32(&words)[16] = slot[step % kSlots];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool of_k = step < kParts;
      const void* row_g = of_k ? tile.k.row(8 * (i / 2)) : tile.v.row(8 * (i / 2) + i % 2);
      const int at = (of_k ? step : step - kParts) * kPartBytes + (of_k ? i % 2 * (kPartBytes / 2) : 0);
      const uint4 four = ld_global_stream_v4(static_cast<const char*>(row_g) + at);
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }

  // The step that takes the slot after `step`.
  __device__ __forceinline__ void load_later(int step, const KeysAndValues& tile, const KeysAndValues& next,
                                             bool more) {
    if (step + kSlots < kSteps) {
      load(step + kSlots, tile);
    } else if (more) {
      load(step + kSlots - kSteps, next);
    }
  }

  __device__ __forceinline__ static void load_scales(float (&scales)[2], const Tile& tile) {
    if constexpr (kScaled) {
      scales[0] = tile.scale(0);
      scales[1] = tile.scale(8);
    }
  }

  __device__ __forceinline__ static void clear_rows(uint32 (&words)[16], int keys) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (8 * (i / 2) + 2 * Base::t() + i % 2 < keys) continue;
#pragma unroll
      for (int x = 0; x < 4; x++) words[4 * i + x] = 0;
    }
  }
};

// Rows on tensor cores by the head dim. kAhead: tiles on the way, or above head dim 256 parts of tiles.
template <typename Scalar, typename Item, typename KeyItem, int kHeadDim, int kRows, int kAhead,
          bool kWide = (kHeadDim > 256)>
struct ChosenRows {
  using Type = TensorCoreRows<Scalar, Item, kHeadDim, kRows, kAhead, KeyItem>;
};
template <typename Scalar, typename Item, int kHeadDim, int kAhead>
struct ChosenRows<Scalar, Item, Item, kHeadDim, 8, kAhead, true> {
  using Type = StreamedRows<Scalar, Item, kHeadDim, kAhead>;
};
