// Products of one warp's rows with tiles of 16 keys, in float32 arithmetic: any dtype, head dim and alignment.
//
// A row of K or V is spread over LANES neighbouring lanes, VEC items each, so that a load brings 32 / LANES rows, and
// a lane holds a part of every query row. The parts of the products are summed over the row's lanes by halving: in each
// step a lane keeps one half of its sums and gives the other away, until it has two scores, of one key: whose scales of
// K and V, where caches have them, are factors of the scores and of their weights.
#pragma once

#include "block_loader.cuh"
#include "cache_items.cuh"
#include "query_rows.cuh"

template <typename Scalar_, typename Item, int kHeadDim, int kVec, int kLanes, int kRows_, typename KeyItem = Item>
struct FloatRows {
  using Scalar = Scalar_;
  using Tile = CacheTile<Item>;  // of V, and of K unless its items are others
  using KeyTile = CacheTile<KeyItem>;
  using Items = StoredItems<Item, kVec>;
  using KeyItems = StoredItems<KeyItem, kVec>;
  static constexpr int kBits = StoredFormat<Item>::kBits, kKeyBits = StoredFormat<KeyItem>::kBits;
  static constexpr bool kScaled = StoredFormat<Item>::kScaled, kKeysScaled = StoredFormat<KeyItem>::kScaled;
  static constexpr bool kStreams = false;
  struct Queries {};                   // in shared memory: none
  static constexpr int kTogether = 4;  // rows whose products are summed over lanes at once
  static constexpr int kRows = kRows_, kGroups = kRows / kTogether;
  static constexpr int kPassRows = kHeadDim <= 256 ? kRows : kRows / 2;  // that pass through shared memory at once
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kLaneRows = 2 * kGroups, kLaneKeys = 1;
  static constexpr int kRowLanes = 2;
  static constexpr int kKeysAtOnce = kWarpSize / kLanes;
  static constexpr int kLoads = kTileKeys / kKeysAtOnce;
  static constexpr int kChunks = div_up(kHeadDim, kVec* kLanes);
  // Registers that K and V of the next tile, q, acc and the sums take: with more, tiles are loaded when they are used.
  static constexpr int kItemBytes = sizeof(Items) + sizeof(KeyItems);  // of K and V in a load
  static constexpr int kAheadRegisters = kLoads * (kItemBytes / 4 + kRows) + 2 * kRows * kVec;
  // Single bytes, of rows that begin anywhere, are 32-bit registers each.
  static constexpr bool kAhead = kChunks == 1 && kAheadRegisters <= 120 && kVec * kBits > 8 && kVec* kKeyBits > 8;
  static constexpr int kTilesAhead = kAhead ? 1 : 0, kSlots = 1;
  // Loads at once where they are not ahead.
  static constexpr int kBurst = kChunks > 4 || kVec* kChunks > 8 ? 4 : kVec * kChunks > 4 && kLoads > 8 ? 8 : kLoads;
  static_assert(kLanes >= 4 && kLanes <= kWarpSize && (kLanes & (kLanes - 1)) == 0, "a power of two lanes");
  static_assert(kRows % kTogether == 0, "whole groups of rows");
  static_assert(kHeadDim % kVec == 0, "a row is a whole number of vectors");

  float q[kRows][kChunks][kVec];
  KeyItems k[kAhead ? kLoads : 1];
  Items v[kAhead ? kLoads : 1];
  float k_scale, v_scale;
  float s[kGroups][2];
  float acc[kRows][kChunks][kVec];

  // For the lanes that hold one row, and the rows that lie side by side in a load.
  __device__ __forceinline__ static int row_lane() { return lane_index() % kLanes; }
  __device__ __forceinline__ static int key_lane() { return lane_index() / kLanes; }
  __device__ __forceinline__ static LaneCoordinates k_coords() {
    return {key_lane(), stored<KeyItem>(row_lane() * kVec)};
  }
  __device__ __forceinline__ static LaneCoordinates v_coords() { return {key_lane(), stored<Item>(row_lane() * kVec)}; }
  __device__ __forceinline__ static int item_of(int chunk) { return (chunk * kLanes + row_lane()) * kVec; }
  __device__ __forceinline__ static bool has(int chunk) {
    return (chunk + 1) * kLanes * kVec <= kHeadDim || item_of(chunk) < kHeadDim;
  }
  __device__ __forceinline__ static int row_of(int i) { return i / 2 * kTogether + row_lane() % 2 * 2 + i % 2; }
  __device__ __forceinline__ static int key_of(int) { return row_lane() / 2 * kKeysAtOnce + key_lane(); }
  __device__ __forceinline__ float& score(int i, int) { return s[i / 2][i % 2]; }

  __device__ __forceinline__ void begin(const SegmentRows& rows, const Scalar* q_g) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const Scalar* row_g = rows.q(q_g, min(r, rows.count - 1));
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
#pragma unroll
        for (int x = 0; x < kVec; x++) q[r][c][x] = acc[r][c][x] = 0.f;
        if (r < rows.count && has(c)) load_query(q[r][c], row_g + item_of(c));
      }
    }
  }

  __device__ __forceinline__ void load_k(int, const KeyTile& tile) {
    if constexpr (kAhead) load_rows(k, tile);
    if constexpr (kKeysScaled) k_scale = tile.scale(0);
  }
  __device__ __forceinline__ void load_v(int, const Tile& tile) {
    if constexpr (kAhead) load_rows(v, tile);
    if constexpr (kScaled) v_scale = tile.scale(0);
  }

  // Rows of V from `keys` on become zeros: a slot that is not used may hold NaN, of which 0 times would be NaN. Of
  // integers only the scale can be one.
  __device__ __forceinline__ void clear_v(int, int keys) {
    if constexpr (kScaled) {
      if (key_of(0) >= keys) v_scale = 0.f;
    } else if constexpr (kAhead) {
#pragma unroll
      for (int n = 0; n < kLoads; n++) {
        if (n * kKeysAtOnce + key_lane() >= keys) v[n].clear();
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(int, const KeyTile& tile) {
    float sums[kGroups][kLoads * kTogether];
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      if constexpr (kAhead) {
        add_products(sums, k, c);
      } else {
#pragma unroll
        for (int first = 0; first < kLoads; first += kBurst) {
          if (kChunks > 4) __syncwarp();  // what is loaded in all bursts at once has no registers
          KeyItems loaded[kBurst];
          load_rows(loaded, tile, c, first);
          add_products(sums, loaded, c, first);
        }
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      halve<kLanes>(sums[group]);
#pragma unroll
      for (int i = 0; i < 2; i++) s[group][i] = kKeysScaled ? sums[group][i] * k_scale : sums[group][i];
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[kLaneRows]) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float own = factor[r / kTogether * 2 + r % 2];
      const float row_factor = __shfl_sync(kFullWarp, own, holder(0, r));
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
#pragma unroll
        for (int x = 0; x < kVec; x++) acc[r][c][x] *= row_factor;
      }
    }
  }

  // acc += P V, with P in place of the scores; of the tile's keys `keys` are in use.
  __device__ __forceinline__ void add_values(int, const Tile& tile, int keys) {
    if constexpr (kScaled) {
#pragma unroll
      for (int group = 0; group < kGroups; group++) {
#pragma unroll
        for (int i = 0; i < 2; i++) s[group][i] *= v_scale;
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; c++) {
      if constexpr (kAhead) {
        add_weighted(v, c);
      } else {
#pragma unroll
        for (int first = 0; first < kLoads; first += kBurst) {
          if (kChunks > 4) __syncwarp();  // what is loaded in all bursts at once has no registers
          Items loaded[kBurst];
          load_rows(loaded, tile, c, first, keys);
          add_weighted(loaded, c, first);
        }
      }
    }
  }

  // Sum over the keys that lay side by side.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
#pragma unroll
        for (int x = 0; x < kVec; x++) {
#pragma unroll
          for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
            acc[r][c][x] += __shfl_xor_sync(kFullWarp, acc[r][c][x], distance);
          }
        }
      }
    }
  }

  // Rows of a pass to shared memory, kStride floats from one to the next.
  template <int kStride>
  __device__ __forceinline__ void store(int pass, float* rows_s) const {
    if (key_lane() != 0) return;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r / kPassRows != pass) continue;
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
        if (!has(c)) continue;
        constexpr int kPiece = kVec % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int x = 0; x < kVec; x += kPiece) {
          Vec<float, kPiece> piece;
#pragma unroll
          for (int y = 0; y < kPiece; y++) piece.item[y] = acc[r][c][x + y];
          *reinterpret_cast<Vec<float, kPiece>*>(rows_s + r % kPassRows * kStride + item_of(c) + x) = piece;
        }
      }
    }
  }

 private:
  // The lane that has the score of row r with key n * kKeysAtOnce + key_lane().
  __device__ __forceinline__ static int holder(int n, int r) { return key_lane() * kLanes + 2 * n + r % kTogether / 2; }

  // As pointers count.
  template <typename Stored>
  __device__ __forceinline__ static int stored(int items) {
    return items * StoredFormat<Stored>::kBits / (8 * static_cast<int>(sizeof(Stored)));
  }

  // A pair of items may start at any of q's.
  __device__ __forceinline__ static void load_query(float (&items)[kVec], const Scalar* source) {
    if constexpr (kVec * kBits > 8 && kVec * kKeyBits > 8) {
      load_vec(items, source);
    } else {
#pragma unroll
      for (int x = 0; x < kVec; x++) items[x] = to_float(source[x]);
    }
  }

  // Rows of the tile from that of load `first` on.
  template <typename Stored, int kCount>
  __device__ __forceinline__ static void load_rows(StoredItems<Stored, kVec> (&rows)[kCount],
                                                   const CacheTile<Stored>& tile, int chunk = 0, int first = 0,
                                                   int keys = kTileKeys) {
#pragma unroll
    for (int n = 0; n < kCount; n++) {
      const int key = (first + n) * kKeysAtOnce + key_lane();
      rows[n].clear();
      if (key < keys && has(chunk))
        rows[n].load(tile.row((first + n) * kKeysAtOnce) + stored<Stored>(chunk * kLanes * kVec));
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_products(float (&sums)[kGroups][kLoads * kTogether],
                                               const KeyItems (&rows)[kCount], int chunk, int first = 0) const {
#pragma unroll
    for (int n = 0; n < kCount; n++) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float& sum = sums[r / kTogether][(first + n) * kTogether + r % kTogether];
        if (chunk == 0) sum = 0.f;
#pragma unroll
        for (int x = 0; x < kVec; x++) sum = __fmaf_rn(q[r][chunk][x], rows[n].item(x), sum);
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void add_weighted(const Items (&rows)[kCount], int chunk, int first = 0) {
#pragma unroll
    for (int n = 0; n < kCount; n++) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float p = __shfl_sync(kFullWarp, s[r / kTogether][r % 2], holder(first + n, r));
#pragma unroll
        for (int x = 0; x < kVec; x++) {
          acc[r][chunk][x] = __fmaf_rn(p, rows[n].item(x), acc[r][chunk][x]);
        }
      }
    }
  }

  // A template: a loop over kHalf would be unrolled too late, and the sums go to local memory.
  template <int kHalf>
  __device__ __forceinline__ static void halve(float (&sums)[kLoads * kTogether]) {
    const bool upper = row_lane() & (kHalf / 2);
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
      const float kept = upper ? sums[i + kHalf] : sums[i], given = upper ? sums[i] : sums[i + kHalf];
      sums[i] = kept + __shfl_xor_sync(kFullWarp, given, kHalf / 2);
    }
    if constexpr (kHalf > 2) halve<kHalf / 2>(sums);
  }
};
