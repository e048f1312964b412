// A tile: kRows consecutive rows of a strided global matrix, in shared memory as float32, brought there by the whole
// CTA (cooperative thread array: a block of threads).
//
// Rows from `valid_rows` on and columns from kCols to kPaddedCols become zero and are never read from memory, so a
// ragged edge costs a predicate, not a second loop, and whatever lies behind the array (NaN too) stays out.
#pragma once

#include "vec.cuh"

template <int kRows_, int kCols_, int kPaddedCols_, int kRowStride_>
struct Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;              // columns that exist in memory
  static constexpr int kPaddedCols = kPaddedCols_;  // columns that readers of the tile may touch
  static constexpr int kRowStride = kRowStride_;    // floats from one row to the next
  static constexpr int kItems = kRows * kRowStride;
  static_assert(kCols <= kPaddedCols && kPaddedCols <= kRowStride, "columns lie within a row");
};

// Four float columns are one 16-byte word of shared memory. With an odd number of words a row, eight lanes that read
// the same column of eight neighbouring rows touch all 32 banks once.
__host__ __device__ constexpr int conflict_free_stride(int cols) {
  const int words = div_up(cols, 4);
  return (words % 2 == 1 ? words : words + 1) * 4;
}

template <typename TileShape, int kThreads, int kVec, typename Scalar>
__device__ __forceinline__ void load_tile(float* tile_s, const Scalar* rows_g, int64 row_stride, int valid_rows) {
  static_assert(TileShape::kCols % kVec == 0, "a row is a whole number of vectors");
  constexpr int kColVecs = div_up(TileShape::kPaddedCols, kVec);
  static_assert(kColVecs * kVec <= TileShape::kRowStride, "the padding fits in a row");

  for (int at = threadIdx.x; at < TileShape::kRows * kColVecs; at += kThreads) {
    const int row = at / kColVecs;
    const int col = at % kColVecs * kVec;
    float values[kVec] = {};
    if (row < valid_rows && col < TileShape::kCols) load_vec(values, rows_g + row * row_stride + col);
    constexpr int kPiece = kVec < 4 ? kVec : 4;  // floats of one store
#pragma unroll
    for (int i = 0; i < kVec; i += kPiece) {
      Vec<float, kPiece> piece;
#pragma unroll
      for (int j = 0; j < kPiece; j++) piece.item[j] = values[i + j];
      *reinterpret_cast<Vec<float, kPiece>*>(tile_s + row * TileShape::kRowStride + col + i) = piece;
    }
  }
}
