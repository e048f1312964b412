// From a warp's accumulators to memory: two neighbouring columns a lane become, by exchanges within a quad of lanes,
// eight (four where a warp has but two tiles of columns left), so that a thread stores 16 bytes.
#pragma once

#if !defined(OUT_VEC)
#error "OUT_VEC comes from a launch-configuration table"
#endif
#include "../../common/pack.cuh"
#include "params.cuh"

static_assert(OUT_VEC == 1 || OUT_VEC == kPairItems, "single items or whole chunks");

// kWords tiles of 8 columns, of each of which a quad's lane q has word q; becomes kWords neighbouring words of one tile.
// Doing so twice changes nothing.
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

// kWords words at `row_g` + column, items from `columns` on excepted.
template <int kWords>
__device__ __forceinline__ void load_words(uint32 (&words)[kWords], const float16* row_g, int column, int columns) {
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

template <int kWords>
__device__ __forceinline__ void store_words(float16* row_g, const uint32 (&words)[kWords], int column, int columns) {
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

// A matrix of the results' shape: where its lines begin. Of paired axes `rows` and `columns` are those of one half.
struct Matrix {
  float16* array_g;
  int64 stride;
};

// A warp's rows and columns of the result, `first_row` and `first_column` being places in the axes.
template <typename Rows, typename Columns>
struct WarpPlace {
  using ColumnAxis = Columns;
  int first_row, first_column;
  int rows, columns;

  __device__ __forceinline__ int row_place(int m_tile, int half) const {
    return first_row + 16 * m_tile + 8 * half + lane_index() / 4;
  }
  __device__ __forceinline__ bool has_row(int place) const { return Rows::item(place) < rows; }
  __device__ __forceinline__ int64 row(int place) const {
    return Rows::item(place) + static_cast<int64>(Rows::half(place)) * rows;
  }
  // Of the half that a column lies in, the first.
  __device__ __forceinline__ int half_column(int place) const { return Columns::half(place) * columns; }
};

// kWords neighbouring tiles of columns of one row, from the tile at `first_tile` on: each lane has two columns of each.
// Rounded once, with the addend, if there is one.
template <int kWords, typename Place>
__device__ __forceinline__ void write_columns(const Matrix& to, const Matrix& addend, float (&values)[kWords][2],
                                              const Place& place, int row_place, int column_place) {
  using Columns = typename Place::ColumnAxis;
  const bool exists = place.has_row(row_place);
  const int own = column_place + column_in_quad<kWords>();
  const int column = Columns::item(own), half_column = place.half_column(own);
  const int64 row = place.row(row_place);
  uint32 words[kWords];
  if (addend.array_g != nullptr) {
    const int columns = exists ? place.columns : 0;
    load_words(words, addend.array_g + row * addend.stride + half_column, column, columns);
    transpose_in_quad(words);
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const float2 more = unpack_halves(words[i]);
      values[i][0] += more.x;
      values[i][1] += more.y;
    }
  }
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = pack_halves(values[i][0], values[i][1]);
  transpose_in_quad(words);
  if (exists) store_words(to.array_g + row * to.stride + half_column, words, column, place.columns);
}

// One row of tiles, 4 at a time and what is left: values(tile, x) gives two columns.
template <int kFirst, int kTiles, typename Place, typename Values>
__device__ __forceinline__ void write_row(const Matrix& to, const Matrix& addend, const Place& place, int row_place,
                                          const Values& values_of) {
  if constexpr (kFirst < kTiles) {
    constexpr int kWords = kTiles - kFirst >= 4 ? 4 : 2;
    float values[kWords][2];
#pragma unroll
    for (int i = 0; i < kWords; i++) values_of(kFirst + i, values[i]);
    write_columns<kWords>(to, addend, values, place, row_place, place.first_column + kFirst * 8);
    write_row<kFirst + kWords, kTiles>(to, addend, place, row_place, values_of);
  }
}

// Two columns of each tile of a row, as they were summed up.
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
template <int kMTiles, int kTiles, typename Place>
__device__ __forceinline__ void store_sums(const Matrix& to, const Matrix& addend,
                                           const float (&acc)[kMTiles][kTiles][4], const Place& place) {
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      write_row<0, kTiles>(to, addend, place, place.row_place(m, half), SumsOfRow<kTiles>(acc[m], half));
    }
  }
}

// A warp's sums in float32, to a contiguous array of all rows and columns.
template <int kMTiles, int kTiles, typename Place>
__device__ __forceinline__ void store_partials(float* sums_g, const float (&acc)[kMTiles][kTiles][4],
                                               const Place& place) {
  using Columns = typename Place::ColumnAxis;
#pragma unroll
  for (int m = 0; m < kMTiles; m++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row_place = place.row_place(m, half);
      if (!place.has_row(row_place)) continue;
      float* row_g = sums_g + place.row(row_place) * (static_cast<int64>(place.columns) * Columns::kHalves);
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const int own = place.first_column + 8 * n + lane_index() % 4 * 2;
        const int column = Columns::item(own);
        float* pair_g = row_g + place.half_column(own) + column;
        if (OUT_VEC > 1) {
          if (column < place.columns) {
            *reinterpret_cast<float2*>(pair_g) = make_float2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
          }
        } else {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            if (column + e < place.columns) pair_g[e] = acc[m][n][2 * half + e];
          }
        }
      }
    }
  }
}
