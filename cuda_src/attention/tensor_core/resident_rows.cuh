// Rows that a CTA keeps for its whole life (its keys and values, or its queries): from global memory to a swizzled tile
// in shared memory, from there to A fragments in registers; and its results the other way.
#pragma once

#include "../../common/pack.cuh"
#include "tile_loader.cuh"

// Rows as they are in memory: `chunk` of a row, which lies at chunk_g.
template <int kCols, int kVec>
struct StoredChunks {
  __device__ __forceinline__ uint4 operator()(const void* chunk_g, int /*item*/, int chunk) const {
    return load_chunk<kCols, kVec>(chunk_g, chunk);
  }
};

// Whether a tile has whole chunks beyond `kCols` columns.
template <typename Tile, int kCols>
constexpr bool kHasSpareChunks = Tile::kChunks * kChunkItems - kCols >= kChunkItems;

// Items from `valid_rows` on and chunks beyond the columns become zero and are not read.
template <typename Tile, int kCols, int kVec, int kThreads, typename Order = RowsInOrder,
          typename Chunks = StoredChunks<kCols, kVec>, typename Scalar = float16>
__device__ __forceinline__ void load_rows(uint32 tile_s, const Scalar* rows_g, int64 row_stride, int valid_rows,
                                          const Chunks& chunks = {}) {
#pragma unroll 4
  for (int at = threadIdx.x; at < Tile::kRows * Tile::kChunks; at += kThreads) {
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
    const int item = Order::item_of_row(row);
    uint4 quad = make_uint4(0, 0, 0, 0);
    const bool exists = item < valid_rows && (!kHasSpareChunks<Tile, kCols> || chunk * kChunkItems < kCols);
    if (exists) quad = chunks(rows_g + item * row_stride + chunk * kChunkItems, item, chunk);
    st_shared_v4(tile_s + Tile::offset(row, chunk), quad);
  }
}

// kMTiles * 16 rows from first_row on as A fragments: two 8x8 matrices (rows 0-7 and 8-15) for each k8 step, from chunk
// first_chunk on.
template <typename Tile, int kMTiles, int kSteps>
__device__ __forceinline__ void load_a_fragments(uint32 (&a)[kMTiles][kSteps][2], uint32 tile_s, int first_row,
                                                 int first_chunk = 0) {
  const int lane_row = first_row + lane_index() % 16;
#pragma unroll
  for (int i = 0; i < kMTiles; i++) {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      const bool pair = step + 1 < kSteps;
      const uint32 address =
          tile_s + Tile::offset(lane_row + i * 16, first_chunk + step + (pair ? lane_index() / 16 : 0));
      if (pair) {
        uint32 r[4];
        ldmatrix<4>(r, address);
        a[i][step][0] = r[0];
        a[i][step][1] = r[1];
        a[i][step + 1][0] = r[2];
        a[i][step + 1][1] = r[3];
      } else {
        ldmatrix<2>(a[i][step], address);
      }
    }
  }
}

// A warp's accumulators, times `scale`, to its rows of a tile in shared memory, from chunk first_chunk on.
template <typename Tile, typename Scalar = float16, int kMTiles, int kTiles>
__device__ __forceinline__ void round_to_tile(uint32 tile_s, int first_row, const float (&acc)[kMTiles][kTiles][4],
                                              float scale, int first_chunk = 0) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + 16 * i + 8 * half + lane_index() / 4;
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        st_shared_u32(tile_s + Tile::offset(row, first_chunk + n) + lane_index() % 4 * 4,
                      pack_pair<Scalar>(acc[i][n][2 * half] * scale, acc[i][n][2 * half + 1] * scale));
      }
    }
  }
}

// Store kItems neighbouring items, or add them to what is there.
template <typename Scalar, int kItems>
__device__ __forceinline__ void store_items(Scalar* target_g, const float (&values)[kItems], bool accumulate) {
  float sums[kItems];
  if (accumulate) load_vec(sums, target_g);
#pragma unroll
  for (int e = 0; e < kItems; e++) sums[e] = accumulate ? sums[e] + values[e] : values[e];
  store_vec(target_g, sums);
}

// Chunk `chunk` of a row of kCols columns: whole where rows are aligned, otherwise item by item.
template <int kCols, int kVec, typename Scalar>
__device__ __forceinline__ void store_row_chunk(Scalar* chunk_g, int chunk, const float (&values)[kChunkItems],
                                                bool accumulate) {
  if constexpr (kVec == kChunkItems) {
    store_items(chunk_g, values, accumulate);
  } else {
#pragma unroll
    for (int e = 0; e < kChunkItems; e++) {
      const float value[1] = {values[e]};
      if (chunk * kChunkItems + e < kCols) store_items(chunk_g + e, value, accumulate);
    }
  }
}

// The first `rows` items of a tile in shared memory to memory, in whole chunks where rows are aligned.
template <typename Tile, int kCols, int kVec, int kThreads, typename Order = RowsInOrder, typename Scalar>
__device__ __forceinline__ void store_rows(Scalar* rows_g, int64 row_stride, const unsigned char* tile_s, int rows,
                                           bool accumulate) {
  for (int at = threadIdx.x; at < Tile::kRows * Tile::kChunks; at += kThreads) {
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
    const int item = Order::item_of_row(row);
    if (kHasSpareChunks<Tile, kCols> && chunk * kChunkItems >= kCols) continue;
    if (item >= rows) {
      if (Order::kInOrder) break;
      continue;
    }
    float values[kChunkItems];
    load_vec(values, reinterpret_cast<const Scalar*>(tile_s + Tile::offset(row, chunk)));
    store_row_chunk<kCols, kVec>(rows_g + item * row_stride + chunk * kChunkItems, chunk, values, accumulate);
  }
}
