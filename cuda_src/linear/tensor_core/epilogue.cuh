// Stores of a warp's accumulators. A lane has two neighbouring columns; exchanges within a quad of lanes turn them into
// eight (four if a warp has only two tiles of columns left), so that a thread stores 16 bytes.
#pragma once

#if !defined(OUT_VEC)
#error "OUT_VEC comes from a launch-configuration table"
#endif
#include "../../common/pack.cuh"
#include "../../common/vec.cuh"
#include "params.cuh"

static_assert(OUT_VEC == 1 || OUT_VEC == kPairItems, "single items or whole chunks");

// Exchange words within a quad: lane q has word q of each of kWords tiles of 8 columns, and gets kWords neighbouring
// words of one tile. The exchange is its own inverse.
template <int kWords>
__device__ __forceinline__ void transpose_in_quad(uint32 (&words)[kWords]) {
  static_assert(kWords == 2 || kWords == 4, "lanes in pairs or quads");
#pragma unroll
  for (int distance = 1; distance < kWords; distance *= 2) {
    const bool upper = lane_index() & distance;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      if (i & distance) continue;
      uint32 &low = words[i], &high = words[i + distance];
      const uint32 got = __shfl_xor_sync(kFullWarp, upper ? low : high, distance);
      if (upper) {
        low = got;
      } else {
        high = got;
      }
    }
  }
}

// The first column, counted from that of the first tile, that a lane has after the exchange.
template <int kWords>
__device__ __forceinline__ int column_in_quad() {
  const int q = lane_index() % 4;
  return kWords == 4 ? q * 8 : q % 2 * 8 + q / 2 * 4;
}

// kWords words of 16-bit items at `row_g` + column, except items from `columns` on.
template <int kWords, typename Scalar>
__device__ __forceinline__ void load_words(uint32 (&words)[kWords], const Scalar* row_g, int column, int columns) {
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = 0;
  if constexpr (OUT_VEC > 1) {
    if (column >= columns) return;
    if constexpr (kWords == 4) {
      const uint4 v = ld_global_v4(row_g + column);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(row_g + column);
      words[0] = v.x, words[1] = v.y;
    }
  } else {
    const uint16* items_g = reinterpret_cast<const uint16*>(row_g);
#pragma unroll
    for (int i = 0; i < 2 * kWords; i++) {
      if (column + i < columns) words[i / 2] |= static_cast<uint32>(items_g[column + i]) << 16 * (i % 2);
    }
  }
}

template <int kWords, typename Scalar>
__device__ __forceinline__ void store_words(Scalar* row_g, const uint32 (&words)[kWords], int column, int columns) {
  if constexpr (OUT_VEC > 1) {
    if (column >= columns) return;
    if constexpr (kWords == 4) {
      st_global_v4(row_g + column, make_uint4(words[0], words[1], words[2], words[3]));
    } else {
      *reinterpret_cast<uint2*>(row_g + column) = make_uint2(words[0], words[1]);
    }
  } else {
    uint16* items_g = reinterpret_cast<uint16*>(row_g);
#pragma unroll
    for (int i = 0; i < 2 * kWords; i++) {
      if (column + i < columns) items_g[column + i] = static_cast<uint16>(words[i / 2] >> 16 * (i % 2));
    }
  }
}

// A matrix that is written, or added.
template <typename Scalar>
struct MatrixOf {
  Scalar* array_g;
  int64 stride;  // from row to row, in items
};

// The place of a warp's sums in the result: the first row, the first position in the axis of columns, and the lengths
// of both axes (with paired columns, of each half).
template <typename Columns_>
struct WarpCoordinates {
  using Columns = Columns_;
  int first_row, first_place;
  int rows, columns;

  __device__ __forceinline__ int row(int m_tile, int half) const {
    return first_row + 16 * m_tile + 8 * half + lane_index() / 4;
  }
};

// write_columns of float32: a lane's pairs of columns are stored as they are, because a quad of lanes fills a sector.
template <int kWords, typename Coordinates>
__device__ __forceinline__ void write_floats(const MatrixOf<float32>& to, const MatrixOf<float32>& addend,
                                             const float (&values)[kWords][2], const Coordinates& place, int row,
                                             int first_place) {
  using Columns = typename Coordinates::Columns;
  if (row >= place.rows) return;
#pragma unroll
  for (int i = 0; i < kWords; i++) {
    const int own = first_place + 8 * i + lane_index() % 4 * 2;
    const int column = Columns::item(own), half_column = Columns::half(own) * place.columns;
    float32* pair_g = to.array_g + row * to.stride + half_column + column;
    const float32* added_g = addend.array_g + row * addend.stride + half_column + column;
    if (OUT_VEC > 1 && column < place.columns) {
      float2 pair = make_float2(values[i][0], values[i][1]);
      if (addend.array_g != nullptr) {
        const float2 more = *reinterpret_cast<const float2*>(added_g);
        pair.x += more.x, pair.y += more.y;
      }
      *reinterpret_cast<float2*>(pair_g) = pair;
    } else if (OUT_VEC == 1) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (column + e < place.columns) pair_g[e] = addend.array_g ? values[i][e] + added_g[e] : values[i][e];
      }
    }
  }
}

// One row of kWords neighbouring tiles of columns, the first of which begins at `first_place`; a lane has two columns
// of each. They are rounded once, with the addend, if there is one.
template <int kWords, typename Coordinates, typename Scalar>
__device__ __forceinline__ void write_columns(const MatrixOf<Scalar>& to, const MatrixOf<Scalar>& addend,
                                              float (&values)[kWords][2], const Coordinates& place, int row,
                                              int first_place) {
  using Columns = typename Coordinates::Columns;
  if constexpr (sizeof(Scalar) == sizeof(float32)) {
    write_floats(to, addend, values, place, row, first_place);
  } else {
    const bool exists = row < place.rows;
    const int own = first_place + column_in_quad<kWords>();
    const int column = Columns::item(own), half_column = Columns::half(own) * place.columns;
    uint32 words[kWords];
    if (addend.array_g != nullptr) {
      load_words(words, addend.array_g + row * addend.stride + half_column, column, exists ? place.columns : 0);
      transpose_in_quad(words);
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        const float2 more = unpack_pair<Scalar>(words[i]);
        values[i][0] += more.x;
        values[i][1] += more.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; i++) words[i] = pack_pair<Scalar>(values[i][0], values[i][1]);
    transpose_in_quad(words);
    if (exists) store_words(to.array_g + row * to.stride + half_column, words, column, place.columns);
  }
}

// One row of a warp's tiles of columns from kFirst on, 4 at a time and then the rest; values_of(n, values) gives this
// lane's two columns of tile n.
template <int kFirst, int kTiles, typename Scalar, typename Coordinates, typename Values>
__device__ __forceinline__ void write_row(const MatrixOf<Scalar>& to, const MatrixOf<Scalar>& addend,
                                          const Coordinates& place, int row, const Values& values_of) {
  if constexpr (kFirst < kTiles) {
    constexpr int kWords = kTiles - kFirst >= 4 ? 4 : 2;
    float values[kWords][2];
#pragma unroll
    for (int i = 0; i < kWords; i++) values_of(kFirst + i, values[i]);
    write_columns<kWords>(to, addend, values, place, row, place.first_place + kFirst * 8);
    write_row<kFirst + kWords, kTiles>(to, addend, place, row, values_of);
  }
}

// The sums of a row, unchanged.
template <int kTiles>
struct SumsOfRow {
  const float (&acc)[kTiles][4];
  int half;

  __device__ __forceinline__ SumsOfRow(const float (&sums)[kTiles][4], int of_half) : acc(sums), half(of_half) {}
  __device__ __forceinline__ void operator()(int n, float (&values)[2]) const {
    values[0] = acc[n][2 * half];
    values[1] = acc[n][2 * half + 1];
  }
};

// A warp's sums, rounded once, with the addend if there is one.
template <typename Scalar, int kMTiles, int kTiles, typename Coordinates>
__device__ __forceinline__ void store_sums(const MatrixOf<Scalar>& to, const MatrixOf<Scalar>& addend,
                                           const float (&acc)[kMTiles][kTiles][4], const Coordinates& place) {
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      write_row<0, kTiles>(to, addend, place, place.row(m, half), SumsOfRow<kTiles>(acc[m], half));
    }
  }
}

// A warp's sums as they are, in float32 or int32, to a contiguous array of all rows and columns.
template <typename Sum, int kMTiles, int kTiles, typename Coordinates>
__device__ __forceinline__ void store_partials(Sum* sums_g, const Sum (&acc)[kMTiles][kTiles][4],
                                               const Coordinates& place) {
  static_assert(!Coordinates::Columns::kPaired, "columns in their order");
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = place.row(m, half);
      if (row >= place.rows) continue;
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const int column = place.first_place + 8 * n + lane_index() % 4 * 2;
        Sum* pair_g = sums_g + static_cast<int64>(row) * place.columns + column;
        const Sum* pair = acc[m][n] + 2 * half;
        if constexpr (OUT_VEC > 1) {
          if (column < place.columns) *reinterpret_cast<Vec<Sum, 2>*>(pair_g) = {pair[0], pair[1]};
        } else {
          if (column < place.columns) pair_g[0] = pair[0];
          if (column + 1 < place.columns) pair_g[1] = pair[1];
        }
      }
    }
  }
}
