// The parameters of a product on tensor cores, and the order in which CTAs compute its tiles.
//
// A product is  result (rows, columns) = A (rows, inner) B (inner, columns):
//   forward  out = x w:      rows M, inner K, columns N (or gate and up)
//   dx       dx = dz w^T:    rows M, inner N (or 2 N), columns K
//   dw       dw = x^T dz:    rows K, inner M, columns N (or 2 N); or its transpose, dz^T x
#pragma once

#include "../../common/mma.cuh"

// Field for field PRODUCT_PARAMS of cupyattn/ops/linear/tiles.py. Strides are in items, from one contiguous line of an
// array to the next. The length of a paired axis is that of one half.
struct ProductParams {
  int64 a_stride, b_stride, preactivation_stride, out_stride, addend_stride;
  int rows, columns, inner;
  int split_inner;              // of the sum, in each of its parts but the last
  int group_log2, splits_log2;  // tiles of rows of neighbouring CTAs; places for splits of the sum
  int column_tiles;
  uint32 column_tiles_reciprocal;  // ceil(2^31 / column_tiles)
};
static_assert(sizeof(ProductParams) == PRODUCT_PARAMS_BYTES, "ProductParams and its NumPy twin are one layout");

constexpr int kPairItems = 8;  // neighbouring items of a half: a chunk

// An axis of the product. A paired axis has two halves of equal length, gate and up, whose chunks are interleaved, so
// that a thread that holds a column of the gate holds the same column of up too.
template <bool kPaired_>
struct Axis {
  static constexpr bool kPaired = kPaired_;
  static constexpr int kHalves = kPaired ? 2 : 1;

  // The half of position `position` of a tile, and its item within the half.
  __device__ __forceinline__ static int half(int position) { return kPaired ? position / kPairItems % 2 : 0; }
  __device__ __forceinline__ static int item(int position) {
    return kPaired ? position / (2 * kPairItems) * kPairItems + position % kPairItems : position;
  }
};

// The tile of the result that a CTA computes, and its split of the sum.
struct TileCoordinates {
  int row_tile, column_tile, split;
};

// Neighbouring CTAs share rows of A and columns of B in L2: the order is a group of row tiles, then the splits of the
// sum, then the next tile of columns. The last group may have places without a tile, and a tile may have a place
// without a split. All of this uses shifts and one product: a division would not stay in uniform registers, nor would
// any address that follows from it.
__device__ __forceinline__ TileCoordinates place_of_cta(const ProductParams& params, uint32 cta) {
  const int group_rows = 1 << params.group_log2, splits = 1 << params.splits_log2;
  const int column_of_group = cta >> (params.group_log2 + params.splits_log2);
  const int group =
      __umulhi(2 * column_of_group + 1, params.column_tiles_reciprocal);  // a half more, against its rounding
  return {group * group_rows + static_cast<int>(cta & (group_rows - 1)), column_of_group - group * params.column_tiles,
          static_cast<int>(cta >> params.group_log2 & (splits - 1))};
}
__device__ __forceinline__ TileCoordinates place_of_cta(const ProductParams& params) {
  return place_of_cta(params, blockIdx.x);
}
