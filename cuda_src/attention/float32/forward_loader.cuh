// How a CTA of the float32 kernel brings Q, K and V to shared memory: one buffer ahead of the arithmetic, each thread
// its share, from global memory to registers as they are and later from there, widened to float32, to shared memory; so
// the latency of the loads passes under the arithmetic in between.
//
// A buffer holds a slice of Q and K (16 columns of all rows of the tile) or a panel of V (16 or 8 keys, all columns).
// Keys are in the order in which the lanes read them (score_tile.cuh). That order permutes the bits of a key's number,
// so that the keys of one thread lie a constant apart.
#pragma once

#include "../../common/vec.cuh"
#include "../params.cuh"

constexpr int kQuadItems = 4;   // neighbouring items of a row that move together
constexpr int kQuadBytes = 16;  // in shared memory

template <typename Scalar>
struct RawQuad {
  uint32 word[sizeof(Scalar)];  // 4 items of 4 or 2 bytes

  __device__ __forceinline__ static RawQuad zero() {
    RawQuad quad;
#pragma unroll
    for (uint32& word : quad.word) word = 0;
    return quad;
  }
};

// Four items from from_g on, of a row with `columns` items from there: what lies beyond is zeros and not read. kVec
// is 4 for rows that are aligned to four items, otherwise 1.
template <int kVec, typename Scalar>
__device__ __forceinline__ RawQuad<Scalar> load_quad(const Scalar* from_g, int columns) {
  static_assert(kVec == 1 || kVec == kQuadItems, "single items or four");
  RawQuad<Scalar> quad = RawQuad<Scalar>::zero();
  if constexpr (kVec == kQuadItems) {
    if (columns <= 0) return quad;
    if constexpr (sizeof(Scalar) == 4) {
      quad = __builtin_bit_cast(RawQuad<Scalar>, ld_global_v4(from_g));
    } else {
      quad = __builtin_bit_cast(RawQuad<Scalar>, ld_global_v2(from_g));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kQuadItems; i++) {
      if (i >= columns) continue;
      if constexpr (sizeof(Scalar) == 4) {
        quad.word[i] = reinterpret_cast<const uint32*>(from_g)[i];
      } else {
        quad.word[i / 2] |= static_cast<uint32>(reinterpret_cast<const uint16*>(from_g)[i]) << (i % 2 * 16);
      }
    }
  }
  return quad;
}

template <typename Scalar>
__device__ __forceinline__ Vec<float, kQuadItems> as_floats(const RawQuad<Scalar>& quad) {
  const auto items = __builtin_bit_cast(Vec<Scalar, kQuadItems>, quad);
  return {to_float(items.item[0]), to_float(items.item[1]), to_float(items.item[2]), to_float(items.item[3])};
}

template <typename Quad>
__device__ __forceinline__ void store_quad(uint32 address, const Quad& quad) {
  st_shared_v4(address, __builtin_bit_cast(uint4, as_floats(quad)));
}

// Each item to a separate column.
template <uint32 kColumnBytes, typename Quad>
__device__ __forceinline__ void store_column_quad(uint32 address, const Quad& quad) {
  const auto items = as_floats(quad);
#pragma unroll
  for (int i = 0; i < kQuadItems; i++) {
    st_shared_u32(address + i * kColumnBytes, __float_as_uint(items.item[i]));
  }
}

// A slice of Q and K, both transposed: 16 columns one after the other, each with all rows of its tile, so that one load
// brings four rows of a column. A thread stores four columns of one row; the row's place is XORed with 8 times the
// number of the quad of columns, so that the four threads of a row and their neighbours' rows lie in 32 banks.
template <int kTileQ_, int kTileK_>
struct SliceShape {
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kChunks = 4;
  static constexpr int kCols = kChunks * kQuadItems;
  static constexpr int kQColumnBytes = kTileQ * sizeof(float);
  static constexpr int kKColumnBytes = kTileK * sizeof(float);
  static constexpr int kKeysAt = kCols * kQColumnBytes;  // K after Q
  static constexpr int kBytes = kKeysAt + kCols * kKColumnBytes;
  static_assert(kTileQ % 32 == 0 && kTileK % 32 == 0, "the XOR stays within 32 rows");

  // The value that is XORed into the address of every row in the columns of a chunk.
  __device__ __forceinline__ static constexpr uint32 flip(int chunk) { return chunk % kChunks * (8 * sizeof(float)); }
};

// A panel of V: two keys of each of 8 column lanes, or of 4.
template <int kKeys_, int kLaneColumns, int kColumnLanes>
struct PanelShape {
  static constexpr int kKeys = kKeys_;
  static_assert(kKeys == 16 || kKeys == 8, "two keys of 8 or of 4 column lanes");
  static constexpr int kRowBytes = kColumnLanes * kLaneColumns * 4;
  static constexpr int kRowQuads = kRowBytes / kQuadBytes;
  static constexpr int kBytes = kKeys * kRowBytes;
};

template <typename Scalar_, typename Scores_, typename Slice_, typename Panel_, int kHeadDim_, int kHeadDimV_,
          int kVec_, int kThreads>
struct ForwardLoader {
  using Scalar = Scalar_;
  using Scores = Scores_;
  using Slice = Slice_;
  using Panel = Panel_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kVec = kVec_;
  // Four threads to a row of a slice, kThreads / Panel::kKeys to a row of a panel.
  static constexpr int kPassRows = kThreads / Slice::kChunks;
  static constexpr int kQPasses = Slice::kTileQ / kPassRows;
  static constexpr int kKPasses = Slice::kTileK / kPassRows;
  static constexpr int kPanelLanes = kThreads / Panel::kKeys;
  static constexpr int kVPasses = div_up(Panel::kRowQuads, kPanelLanes);
  static constexpr int kQuads = kQPasses + kKPasses > kVPasses ? kQPasses + kKPasses : kVPasses;
  static constexpr int kColumnLanes = Scores::Grid::kColumnLanes;
  static_assert(kQPasses * kPassRows == Slice::kTileQ && kKPasses * kPassRows == Slice::kTileK, "whole passes");
  static_assert((kThreads & (kThreads - 1)) == 0, "the rows of a pass are a power of two: key orders permute bits");

  const AttentionParams& params;
  const Scalar *q_g, *k_g, *v_g;  // where this thread begins in the CTA's first slice of Q, in K and in V
  int rows, keys;                 // that exist
  RawQuad<Scalar> quads[kQuads];  // on the way

  __device__ __forceinline__ ForwardLoader(const AttentionParams& all, const Scalar* q_rows_g, const Scalar* k_rows_g,
                                           const Scalar* v_rows_g, int rows_, int keys_)
      : params(all),
        q_g(q_rows_g + slice_row() * all.q.seq + slice_col()),
        k_g(k_rows_g + slice_key(slice_row()) * all.k.seq + slice_col()),
        v_g(v_rows_g + panel_key(0, 0, panel_row()) * all.v.seq + panel_lane() * kQuadItems),
        rows(rows_),
        keys(keys_) {}

  // Nothing has to be known of a tile ahead.
  __device__ __forceinline__ void begin(int, int) {}
  __device__ __forceinline__ void advance(int) {}

  // The key of the tile at a position of a slice: a thread's keys are in groups of four.
  __device__ __forceinline__ static constexpr int slice_key(int at) {
    const int group = at / kQuadItems, item = group / kColumnLanes * kQuadItems + at % kQuadItems;
    return Scores::key_at(group % kColumnLanes, item / 2, item % 2);
  }
  // The key of the tile in a row of a panel of V, and in that column of P: pair by pair, the lanes in order.
  __device__ __forceinline__ static constexpr int panel_key(int pair, int panel, int row) {
    return Scores::key_at(Panel::kKeys / 2 * panel + row / 2, pair, row % 2);
  }

  // Slice `slice` of Q, and of the keys from first_key on, to registers.
  __device__ __forceinline__ void fetch_slice(int slice, int first_key) {
    if (rows < Slice::kTileQ || first_key + Slice::kTileK > keys) {
      fetch_slice_rows<true>(slice, first_key);
    } else {
      fetch_slice_rows<false>(slice, first_key);
    }
  }

  // Panel `panel` of the keys of pair `pair` of the tile at first_key to registers.
  __device__ __forceinline__ void fetch_panel(int pair, int panel, int first_key) {
    if (first_key + Slice::kTileK > keys) {
      fetch_panel_rows<true>(pair, panel, first_key);
    } else {
      fetch_panel_rows<false>(pair, panel, first_key);
    }
  }

  // Store to shared memory what was fetched last.
  __device__ __forceinline__ void store_slice(uint32 buffer_s) const { store_slice(buffer_s, quads + kQPasses); }
  __device__ __forceinline__ void store_panel(uint32 buffer_s) const { store_panel(buffer_s, quads); }

 protected:
  // Fetch with K and V from elsewhere.
  template <typename Quad>
  __device__ __forceinline__ void store_slice(uint32 buffer_s, const Quad* k_quads) const {
    constexpr uint32 kPassBytes = kPassRows * sizeof(float);
    const uint32 row_s = buffer_s + (slice_row() * sizeof(float) ^ Slice::flip(threadIdx.x));
    const uint32 q_s = row_s + slice_col() * Slice::kQColumnBytes;
    const uint32 k_s = row_s + Slice::kKeysAt + slice_col() * Slice::kKColumnBytes;
#pragma unroll
    for (int pass = 0; pass < kQPasses; pass++) {
      store_column_quad<Slice::kQColumnBytes>(q_s + pass * kPassBytes, quads[pass]);
    }
#pragma unroll
    for (int pass = 0; pass < kKPasses; pass++) {
      store_column_quad<Slice::kKColumnBytes>(k_s + pass * kPassBytes, k_quads[pass]);
    }
  }

  template <typename Quad>
  __device__ __forceinline__ void store_panel(uint32 buffer_s, const Quad* v_quads) const {
    const uint32 v_s = buffer_s + panel_row() * Panel::kRowBytes + panel_lane() * kQuadBytes;
#pragma unroll
    for (int pass = 0; pass < kVPasses; pass++) {
      if ((pass + 1) * kPanelLanes > Panel::kRowQuads && pass * kPanelLanes + panel_lane() >= Panel::kRowQuads)
        continue;
      store_quad(v_s + pass * kPanelLanes * kQuadBytes, v_quads[pass]);
    }
  }

  __device__ __forceinline__ static int slice_row() { return threadIdx.x / Slice::kChunks; }
  __device__ __forceinline__ static int slice_col() { return threadIdx.x % Slice::kChunks * kQuadItems; }
  __device__ __forceinline__ static int panel_row() { return threadIdx.x / kPanelLanes; }
  __device__ __forceinline__ static int panel_lane() { return threadIdx.x % kPanelLanes; }

  // How many items of its row a thread loads of a slice, four at the most; none or fewer where its columns do not
  // exist.
  __device__ __forceinline__ static int columns_of(int slice) {
    return kHeadDim % Slice::kCols == 0 ? kQuadItems : kHeadDim - slice * Slice::kCols - slice_col();
  }
  // Fetch a panel.
  __device__ __forceinline__ static int panel_columns_of(int pass) {
    const int col = pass * kPanelLanes * kQuadItems;
    const bool whole = col + kPanelLanes * kQuadItems <= kHeadDimV;
    return whole ? kQuadItems : kHeadDimV - col - panel_lane() * kQuadItems;
  }

  // Addresses go from row to row: as multiples of the strides each would cost several instructions.
  template <bool kRagged>
  __device__ __forceinline__ void fetch_q_rows(int slice) {
    const int columns = columns_of(slice);
    const Scalar* from_g = q_g + slice * Slice::kCols;
#pragma unroll
    for (int pass = 0; pass < kQPasses; pass++, from_g += kPassRows * params.q.seq) {
      const bool exists = !kRagged || slice_row() + pass * kPassRows < rows;
      quads[pass] = exists ? load_quad<kVec>(from_g, columns) : RawQuad<Scalar>::zero();
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_slice_rows(int slice, int first_key) {
    const int columns = columns_of(slice);
    fetch_q_rows<kRagged>(slice);
    const Scalar* from_g = k_g + first_key * params.k.seq + slice * Slice::kCols;
#pragma unroll
    for (int pass = 0; pass < kKPasses; pass++) {
      if (pass > 0) from_g += (slice_key(pass * kPassRows) - slice_key((pass - 1) * kPassRows)) * params.k.seq;
      const bool exists = !kRagged || first_key + slice_key(pass * kPassRows) + slice_key(slice_row()) < keys;
      quads[kQPasses + pass] = exists ? load_quad<kVec>(from_g, columns) : RawQuad<Scalar>::zero();
    }
  }

  template <bool kRagged>
  __device__ __forceinline__ void fetch_panel_rows(int pair, int panel, int first_key) {
    const int key = first_key + panel_key(pair, panel, 0);
    const bool exists = !kRagged || key + panel_key(0, 0, panel_row()) < keys;
#pragma unroll
    for (int pass = 0; pass < kVPasses; pass++) {
      const int col = pass * kPanelLanes * kQuadItems;
      const int columns = panel_columns_of(pass);
      quads[pass] = exists ? load_quad<kVec>(v_g + key * params.v.seq + col, columns) : RawQuad<Scalar>::zero();
    }
  }
};
