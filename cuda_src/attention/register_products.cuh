// Products of matrices in plain registers, for the float32 backward: each thread owns a block of the result and adds
// outer products of what it reads from shared memory.
//
// Both operands lie in shared memory with the index that is summed over, the depth, slowest: C(m, n) += sum_d A(d, m)
// B(d, n). A CTA's threads form a grid of kThreadRows x kThreadColumns; a thread owns groups of up to four neighbouring
// rows and of four neighbouring columns of C, so that one 16-byte load brings a group of an operand.
//
// In a warp neighbouring lanes alternate between rows and columns: of both operands two lanes in four then read the
// same 16 bytes, and a load passes in two wavefronts where 8 lanes side by side would take four (register_tile.cuh).
#pragma once

#include "../common/vec.cuh"
#include "outer_products.cuh"

constexpr int kThreadRows = 8, kThreadColumns = 16;
constexpr int kProductThreads = kThreadRows * kThreadColumns;
constexpr int kDepth = 16;  // of one stage

__device__ __forceinline__ int thread_row() { return warp_index() / 2 * 4 + lane_index() % 2 + lane_index() / 16 * 2; }
__device__ __forceinline__ int thread_column() { return warp_index() % 2 * 8 + lane_index() / 2 % 8; }

// kRows x kColumns of C, by a thread in groups of kRowGroup x kColumnGroup.
template <int kRows_, int kColumns_>
struct Product {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kThreadM = kRows / kThreadRows, kThreadN = kColumns / kThreadColumns;
  static constexpr int kRowGroup = kThreadM < 4 ? kThreadM : 4, kColumnGroup = kThreadN < 4 ? kThreadN : 4;
  static_assert(kThreadM % kRowGroup == 0 && kThreadN % kColumnGroup == 0, "whole groups");

  float c[kThreadM][kThreadN];

  __device__ __forceinline__ static int row_of(int m) {
    return (m / kRowGroup * kThreadRows + thread_row()) * kRowGroup + m % kRowGroup;
  }
  __device__ __forceinline__ static int column_of(int n) {
    return (n / kColumnGroup * kThreadColumns + thread_column()) * kColumnGroup + n % kColumnGroup;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kThreadM; m++) {
#pragma unroll
      for (int n = 0; n < kThreadN; n++) c[m][n] = 0.f;
    }
  }

  // body(item, row, column) for what lies within.
  template <typename Body>
  __device__ __forceinline__ void for_each(int rows, int columns, Body body) const {
#pragma unroll
    for (int m = 0; m < kThreadM; m++) {
      if (row_of(m) >= rows) continue;
#pragma unroll
      for (int n = 0; n < kThreadN; n++) {
        if (column_of(n) < columns) body(c[m][n], row_of(m), column_of(n));
      }
    }
  }

  // Add `depth` outer products; kStrideA and kStrideB floats lie between two of an operand. A stage is read in groups:
  // what lies behind the depth is zeros.
  template <int kStrideA, int kStrideB>
  __device__ __forceinline__ void add(const float* a_s, const float* b_s, int depth) {
    constexpr int kGroup = kThreadM * kThreadN > 32 ? 8 : 4, kGroups = kDepth / kGroup;  // what spills least
    const uint32 a_at_s = shared_address(a_s) + thread_row() * (kRowGroup * sizeof(float));
    const uint32 b_at_s = shared_address(b_s) + thread_column() * (kColumnGroup * sizeof(float));
    add_outer_products<kGroup>(
        c, div_up(depth, kGroup), [&](float (&a)[kThreadM], float (&b)[kThreadN], int group, int step) {
          const int first = group % kGroups * kGroup;
          load_groups<kRowGroup, kThreadRows>(a, a_at_s + (first * kStrideA + step * kStrideA) * sizeof(float));
          load_groups<kColumnGroup, kThreadColumns>(b, b_at_s + (first * kStrideB + step * kStrideB) * sizeof(float));
        });
  }

 private:
  template <int kGroup, int kApart, int kItems>
  __device__ __forceinline__ static void load_groups(float (&x)[kItems], uint32 at_s) {
#pragma unroll
    for (int first = 0; first < kItems; first += kGroup) {
      ld_shared_group<kGroup>(x, first, at_s + first * (kApart * sizeof(float)));
    }
  }
};

// Four neighbouring items of rows of a global matrix on their way to shared memory, as float32: kQuads a thread. What
// lies beyond `rows` rows and `cols` columns is zeros and not read. kVec is 4 for rows aligned to four items, else 1.
template <typename Scalar, int kVec>
__device__ __forceinline__ float4 load_four(const Scalar* row_g, int col, int cols) {
  float x[4] = {};
  if constexpr (kVec == 4) {
    if (col < cols) load_vec(x, row_g + col);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (col + i < cols) x[i] = to_float(row_g[col + i]);
    }
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// kRows rows of a global matrix, of which kDepth columns at a time become a stage: transposed, the columns slowest.
template <typename Scalar, int kRows, int kCols, int kVec>
struct ColumnStage {
  static constexpr int kStride = kRows + 4;  // floats between two columns; whole groups of four
  static constexpr int kFloats = kDepth * kStride;
  static constexpr int kQuads = kRows * kDepth / 4 / kProductThreads;
  static_assert(kQuads * 4 * kProductThreads == kRows * kDepth, "whole passes");

  float4 quads[kQuads];

  __device__ __forceinline__ void fetch(const Scalar* rows_g, int64 row_stride, int rows, int first_col) {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      const bool exists = row(i) < rows;
      quads[i] = exists ? load_four<Scalar, kVec>(rows_g + row(i) * row_stride, first_col + col(), kCols)
                        : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  __device__ __forceinline__ void store(float* stage_s) const {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      float* at_s = stage_s + col() * kStride + row(i);
      at_s[0] = quads[i].x;
      at_s[kStride] = quads[i].y;
      at_s[2 * kStride] = quads[i].z;
      at_s[3 * kStride] = quads[i].w;
    }
  }

 private:
  __device__ __forceinline__ static int row(int i) { return (threadIdx.x + i * kProductThreads) / (kDepth / 4); }
  __device__ __forceinline__ static int col() { return threadIdx.x % (kDepth / 4) * 4; }
};

// kDepth rows of a global matrix with kPaddedCols of their columns, whose last ones may be missing, become a stage as
// they are.
template <typename Scalar, int kPaddedCols, int kVec>
struct RowStage {
  static constexpr int kStride = kPaddedCols;
  static constexpr int kFloats = kDepth * kStride;
  static constexpr int kQuads = kFloats / 4 / kProductThreads;
  static_assert(kQuads * 4 * kProductThreads == kFloats, "whole passes");

  float4 quads[kQuads];

  __device__ __forceinline__ void fetch(const Scalar* rows_g, int64 row_stride, int rows, int cols) {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      const int at = (threadIdx.x + i * kProductThreads) * 4, row = at / kStride, col = at % kStride;
      quads[i] =
          row < rows ? load_four<Scalar, kVec>(rows_g + row * row_stride, col, cols) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  __device__ __forceinline__ void store(float* stage_s) const {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      *reinterpret_cast<float4*>(stage_s + (threadIdx.x + i * kProductThreads) * 4) = quads[i];
    }
  }
};
