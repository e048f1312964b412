// Products of one warp's rows with tiles of 16 keys, on tensor cores: S^T = K Q^T and O^T = V^T P^T, so that keys (then
// columns of V) fill the m16 side of mma.m16n8k8 and the few query rows its n8 side.
//
// K comes by wide loads straight into A fragments: lane (g, t) has units of 8 neighbouring items of rows g and g + 8,
// so the k of a product is permuted, and q's alike. V comes by wide loads too, two rows a lane, and a byte permute
// pairs them: the rows of O^T are permuted so that a lane has units of 8 neighbouring columns. P^T is turned by one
// movmatrix per 8 keys. S^T and O^T have one map from rows to lanes, so a rescale needs no shuffle. No shared memory.
//
// If caches have scales, that of a key of K is a factor of its scores (below 2^104 of float16: it takes kKeyUnit with
// it), and that of V one of its weights. Of weights in float16 it counts in units of the largest so far, rounded down
// to a power of two, and acc counts in that unit.
#pragma once

#include "../../common/mma.cuh"
#include "../../common/reduce.cuh"
#include "block_loader.cuh"
#include "cache_items.cuh"
#include "query_rows.cuh"

// A lane's part of a row that kSharers lanes share, in loads as wide as can be.
template <int kSharers, int kWords_>
struct RowWords {
  static constexpr int kWords = kWords_, kPiece = kWords < 4 ? kWords : 4;

  uint32 word[kWords];

  // The word of the row at which a piece of a lane begins.
  __device__ __forceinline__ static int offset_of(int piece, int sharer) {
    return (piece * kSharers + sharer) * kPiece;
  }

  // From the lane's first word of the row on.
  __device__ __forceinline__ void load(const void* lane_g) {
#pragma unroll
    for (int i = 0; i < kWords / kPiece; i++) {
      const uint32* piece_g = static_cast<const uint32*>(lane_g) + offset_of(i, 0);
      if constexpr (kPiece == 4 && kWords * kSharers * 4 >= 128) {
        const uint4 loaded = ld_global_stream_v4(piece_g);
        word[4 * i] = loaded.x, word[4 * i + 1] = loaded.y, word[4 * i + 2] = loaded.z, word[4 * i + 3] = loaded.w;
      } else {
        uint32 loaded[kPiece];
        ld_global_stream(loaded, piece_g);
#pragma unroll
        for (int x = 0; x < kPiece; x++) word[kPiece * i + x] = loaded[x];
      }
    }
  }
};

template <typename Scalar_, typename Item, int kHeadDim, int kRows_, int kTilesAhead_, typename KeyItem = Item>
struct TensorCoreRows {
  using Scalar = Scalar_;
  using Tile = CacheTile<Item>;  // of V, and of K unless its items are others
  using KeyTile = CacheTile<KeyItem>;
  using Format = CacheFormat<Item, Scalar>;
  using KeyFormat = CacheFormat<KeyItem, Scalar>;
  static constexpr int kRows = kRows_, kRowTiles = kRows / 8;
  static constexpr int kPassRows = kHeadDim <= 128   ? 8
                                   : kHeadDim <= 256 ? 4
                                                     : 2;  // that pass through shared memory at once
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kLaneRows = 2 * kRowTiles, kLaneKeys = 2;
  static constexpr int kRowLanes = 4;  // neighbouring lanes that have different rows
  static constexpr int kColumnTiles = kHeadDim / 16;
  static constexpr int kTilesAhead = kTilesAhead_, kSlots = kTilesAhead > 0 ? kTilesAhead : 1;
  static constexpr int kUnitWords = Format::kBits / 4;  // of 8 items
  static constexpr int kKeyUnitWords = KeyFormat::kBits / 4;
  static constexpr int kRowWords = kHeadDim * Format::kBits / 32;
  static constexpr int kKeyRowWords = kHeadDim * KeyFormat::kBits / 32;
  static constexpr int kWordItems = 4 / sizeof(Item);  // as pointers count
  static constexpr int kKeyWordItems = 4 / sizeof(KeyItem);
  static constexpr bool kScaled = Format::kScaled, kUnits = Format::kUnits;
  static_assert(kRows % 8 == 0, "whole tiles of rows");
  static_assert(kHeadDim % 64 == 0, "eight lanes share a row of V in units of 8 columns");
  using KeyWords = RowWords<4, kKeyRowWords / 4>;
  using ValueWords = RowWords<8, kRowWords / 8>;
  static constexpr bool kStreams = false;
  struct Queries {};  // in shared memory: none

  uint32 q[kRowTiles][kHeadDim / 8];
  KeyWords k[kSlots][2];       // rows g and g + 8
  ValueWords v[kSlots][2][2];  // rows 8 half + 2 t + e
  float k_scales[kSlots][2], v_scales[kSlots][2];
  uint32 operand;            // of Format
  float bias[kRowTiles][2];  // of a product: what items of K are too large by, times q
  float unit, per_unit;      // of acc, a power of two, and 1 / unit
  float s[kRowTiles][4];
  float acc[kRowTiles][kColumnTiles][4];
  float value_bias[kRowTiles][4];  // of acc: what items of V are too large by, times P

  __device__ __forceinline__ static int g() { return lane_index() / 4; }
  __device__ __forceinline__ static int t() { return lane_index() % 4; }
  __device__ __forceinline__ static int row_of(int i) { return i / 2 * 8 + 2 * t() + i % 2; }
  __device__ __forceinline__ static int key_of(int j) { return g() + 8 * j; }
  __device__ __forceinline__ static LaneCoordinates k_coords() {
    return {g(), KeyWords::offset_of(0, t()) * kKeyWordItems};
  }
  __device__ __forceinline__ static LaneCoordinates v_coords() {
    return {2 * t(), ValueWords::offset_of(0, g()) * kWordItems};
  }
  __device__ __forceinline__ float& score(int i, int j) { return s[i / 2][2 * j + i % 2]; }

  __device__ __forceinline__ void begin(const SegmentRows& rows, const Scalar* q_g) {
    constexpr int kPieceUnits = KeyWords::kPiece / kKeyUnitWords;
    constexpr int kItems = 32 / KeyFormat::kBits;  // of a word
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
      const int row = 8 * n + g();
      const Scalar* row_g = rows.q(q_g, min(row, rows.count - 1));
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; i++) {
        const int first = KeyWords::offset_of(i / kPieceUnits, t()) * kItems + i % kPieceUnits * 8;
        uint4 items = make_uint4(0, 0, 0, 0);
        if (row < rows.count) items = ld_global_v4(reinterpret_cast<const void*>(row_g + first));
        uint32 words[4] = {items.x, items.y, items.z, items.w};
        KeyFormat::queries(words);
#pragma unroll
        for (int x = 0; x < 4; x++) q[n][4 * i + x] = words[x];
      }
      clear_sums(n);
    }
    if constexpr (KeyFormat::kScaled) {
      operand = kept_in_register(KeyFormat::kOperand);
      if constexpr (KeyFormat::kBias != 0) sum_bias();
      begin_units();
    }
  }

  __device__ __forceinline__ void load_k(int slot, const KeyTile& tile) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      k[slot][half].load(tile.row(8 * half));
      if constexpr (KeyFormat::kScaled) k_scales[slot][half] = tile.scale(8 * half);
    }
  }

  __device__ __forceinline__ void load_v(int slot, const Tile& tile) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int e = 0; e < 2; e++) v[slot][half][e].load(tile.row(8 * half + e));
      if constexpr (kScaled) v_scales[slot][half] = tile.scale(8 * half);
    }
  }

  // Rows of V from `keys` on become zeros: a slot that is not used may hold NaN, of which 0 times would be NaN. Of
  // integers only the scale can be one.
  __device__ __forceinline__ void clear_v(int slot, int keys) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (kScaled) {
        if (key_of(half) >= keys) v_scales[slot][half] = 0.f;
      } else {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (8 * half + 2 * t() + e < keys) continue;
#pragma unroll
          for (int i = 0; i < ValueWords::kWords; i++) v[slot][half][e].word[i] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(int slot, const KeyTile&) {
    float even[kRowTiles][4], odd[kRowTiles][4];  // two chains: half the latency
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        even[n][e] = KeyFormat::kBias != 0 ? bias[n][e % 2] : 0.f;
        odd[n][e] = 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; i++) {
      uint32 keys[2][4];
#pragma unroll
      for (int half = 0; half < 2; half++) KeyFormat::keys(keys[half], k[slot][half].word + i * kKeyUnitWords, operand);
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const uint32 a[2] = {keys[0][x], keys[1][x]};
#pragma unroll
        for (int n = 0; n < kRowTiles; n++) mma_m16n8k8<Scalar>(x % 2 == 0 ? even[n] : odd[n], a, q[n][4 * i + x]);
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s[n][e] = __fmaf_rn(odd[n][e], KeyFormat::kOdd, even[n][e]);
        if constexpr (KeyFormat::kScaled) s[n][e] *= k_scales[slot][e / 2] * KeyFormat::kKeyUnit;
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[kLaneRows]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][c][e] *= factor[2 * n + e % 2];
      }
#pragma unroll
      for (int e = 0; e < 4; e++) value_bias[n][e] *= factor[2 * n + e % 2];
    }
  }

  // acc += P V, with P in place of the scores.
  __device__ __forceinline__ void add_values(int slot, const Tile&, int) {
    if constexpr (kScaled) scale_weights(v_scales[slot]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32 p[kRowTiles];
#pragma unroll
      for (int n = 0; n < kRowTiles; n++) p[n] = movmatrix_trans(pack_pair<Scalar>(s[n][2 * half], s[n][2 * half + 1]));
      if constexpr (Format::kValueBias != 0) {
#pragma unroll
        for (int n = 0; n < kRowTiles; n++) subtract_bias<Format::kValueBias>(value_bias[n], p[n]);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 64; i++) {
        uint32 columns[8];
        Format::values(columns, v[slot][half][0].word + i * kUnitWords, v[slot][half][1].word + i * kUnitWords,
                       operand);
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const uint32 a[2] = {columns[2 * x], columns[2 * x + 1]};
#pragma unroll
          for (int n = 0; n < kRowTiles; n++) mma_m16n8k8<Scalar>(acc[n][4 * i + x], a, p[n]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish() {}

  // Rows of a pass to shared memory, kStride floats from one to the next.
  template <int kStride>
  __device__ __forceinline__ void store(int pass, float* rows_s) const {
    constexpr int kPieceTiles = ValueWords::kPiece * 32 / Format::kBits / 2;  // a lane has two columns of a tile
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * n + 2 * t() + e - pass * kPassRows;
        if (8 * n / kPassRows > pass || (8 * n + 7) / kPassRows < pass || row < 0 || row >= kPassRows) continue;
        float* row_s = rows_s + row * kStride;
#pragma unroll
        for (int c = 0; c < kColumnTiles; c += 2) {
          const int column = ((c / kPieceTiles * 8 + g()) * kPieceTiles + c % kPieceTiles) * 2;
          const float (*tile)[4] = &acc[n][c];
          *reinterpret_cast<float4*>(row_s + column) =
              make_float4(value(tile[0][e], n, e), value(tile[0][e + 2] * Format::kOdd, n, e), value(tile[1][e], n, e),
                          value(tile[1][e + 2] * Format::kOdd, n, e));
        }
      }
    }
  }

 protected:
  __device__ __forceinline__ void clear_sums(int n) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++) {
#pragma unroll
      for (int e = 0; e < 4; e++) acc[n][c][e] = 0.f;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) value_bias[n][e] = 0.f;
  }

  __device__ __forceinline__ void begin_units() {
    unit = kUnits ? kLeastUnit : 1.f;
    per_unit = kUnits ? kMostUnit : 1.f;
  }

  static constexpr float kLeastUnit = __builtin_bit_cast(float, 0x00800000u);  // 2^-126
  static constexpr float kMostUnit = __builtin_bit_cast(float, 0x7e800000u);   // 2^126 = 1 / kLeastUnit

  // By the instruction that sums products: rows and columns of its result lie as those of scores, and of acc.
  template <int kTooLarge>
  __device__ __forceinline__ static void subtract_bias(float (&sums)[4], uint32 b) {
    constexpr uint32 kLess = 0x80008000u | kTooLarge << 16 | kTooLarge;
    const uint32 a[2] = {kLess, kLess};
    mma_m16n8k8(sums, a, b);
  }

  __device__ __forceinline__ void sum_bias() {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
      float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; i++) subtract_bias<KeyFormat::kBias>(sums, q[n][i]);
      bias[n][0] = sums[0];
      bias[n][1] = sums[1];
    }
  }

  // For a sum in acc that belongs to row e of the lane's two.
  __device__ __forceinline__ float value(float sum, int n, int e) const {
    if constexpr (Format::kValueBias != 0) sum = (sum + value_bias[n][e]) * Format::kValueUnit;
    if constexpr (kUnits) sum *= unit;
    return sum;
  }

  // Weights times scales: at most 2^8 of a weight, times 2.
  __device__ __forceinline__ void scale_weights(const float (&scales)[2]) {
    if constexpr (kUnits) {
      const float top = fmaxf(fabsf(scales[0]), fabsf(scales[1]));
      if (__any_sync(kFullWarp, top >= 2.f * unit)) raise_unit(warp_reduce<Max>(top));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float factor = scales[half] * per_unit;
#pragma unroll
      for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) s[n][2 * half + e] *= factor;
      }
    }
  }

  __device__ __forceinline__ void raise_unit(float scale) {
    const float next = fminf(__uint_as_float(__float_as_uint(scale) & 0x7f800000u), kMostUnit);
    per_unit = __uint_as_float(0x7f000000u - __float_as_uint(next));  // the exponent with its sign turned
    float factor[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; i++) factor[i] = unit * per_unit;
    rescale(factor);
    unit = next;
  }
};
