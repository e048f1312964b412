// Products of matrices in plain registers, for the float32 backward: each thread owns a block of the result and adds
// outer products of what it reads from shared memory.
//
// Both factors lie in shared memory with the index that is summed over, the depth, slowest: C(m, n) += sum_d A(d, m)
// B(d, n). A CTA's threads form a grid of kThreadRows x kThreadColumns; a thread owns groups of up to four neighbouring
// rows and of four neighbouring columns of C, so that one 16-byte load brings a group of a factor.
//
// In a warp neighbouring lanes alternate between rows and columns: of both factors two lanes in four then read the
// same 16 bytes, and a load passes in two wavefronts where 8 lanes side by side would take four (score_tile.cuh).
//
// A place of a factor is XORed with a number of its depth, so that stores from rows and from columns of blocks, four
// apart, and of transposed quads all meet in no bank.
#pragma once

#ifndef THREAD_ROWS
#error "THREAD_ROWS comes from a launch-configuration table"
#endif
#include "../../common/outer_products.cuh"

constexpr int kProductThreads = 128;
constexpr int kThreadRows = THREAD_ROWS, kThreadColumns = kProductThreads / kThreadRows;
constexpr int kWarpColumns = kThreadColumns / 8;  // warps side by side

__device__ __forceinline__ int thread_row() {
  return warp_index() / kWarpColumns * 4 + lane_index() % 2 + lane_index() / 16 * 2;
}
__device__ __forceinline__ int thread_column() { return warp_index() % kWarpColumns * 8 + lane_index() / 2 % 8; }

// The value that is XORed into the address of every place of depth d, within 128 bytes.
__device__ __forceinline__ constexpr uint32 depth_flip(int d) { return (d & 4) * 16 + (d & 8) * 4; }

// The offset in bytes of item `at` of depth d, in a factor with kStride items to a depth.
template <int kStride>
__device__ __forceinline__ constexpr uint32 slot_offset(int d, int at) {
  static_assert(kStride % 32 == 0, "the XOR stays within 32 places");
  return d * (kStride * sizeof(float)) + (at * sizeof(float) ^ depth_flip(d));
}

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
      const int row = not_hoisted(row_of(m));
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < kThreadN; n++) {
        if (column_of(n) < columns) body(c[m][n], row, column_of(n));
      }
    }
  }

  // Add `depth` outer products, in groups, of depths from first_a on of A and of B's kDepth: beyond `depth` are zeros.
  template <int kDepth>
  __device__ __forceinline__ void add(uint32 a_s, int first_a, uint32 b_s, int depth = kDepth) {
    constexpr int kGroup = kDepth < 8 ? kDepth : 8, kGroups = kDepth / kGroup;
    constexpr uint32 kRowBytes = kRows * sizeof(float), kColumnBytes = kColumns * sizeof(float);
    const uint32 a_at_s = a_s + slot_offset<kRows>(first_a, thread_row() * kRowGroup);
    const uint32 b_at_s = b_s + thread_column() * (kColumnGroup * sizeof(float));
    add_products<kGroup>(
        c, div_up(depth, kGroup), [&](float (&a)[kThreadM], float (&b)[kThreadN], int group, int step) {
          const int first = group % kGroups * kGroup;
          const uint32 flip = depth_flip(first) ^ depth_flip(step);
          load_groups<kRowGroup, kThreadRows>(a, (a_at_s ^ flip) + first * kRowBytes + step * kRowBytes);
          load_groups<kColumnGroup, kThreadColumns>(b, (b_at_s ^ flip) + first * kColumnBytes + step * kColumnBytes);
        });
  }

  // kPart rows from part * kPart on to shared memory, as the left factor of a product over the rows.
  template <int kPart>
  __device__ __forceinline__ void store_by_row(uint32 to_s, int part) const {
    static_assert(kPart % (kThreadRows * kRowGroup) == 0, "whole groups of all threads");
#pragma unroll
    for (int m = 0; m < kThreadM; m++) {
      if (m * kThreadRows / kPart != part) continue;
#pragma unroll
      for (int n = 0; n < kThreadN; n += kColumnGroup) {
        float group[kColumnGroup];
#pragma unroll
        for (int i = 0; i < kColumnGroup; i++) group[i] = c[m][n + i];
        st_shared(to_s + slot_offset<kColumns>(not_hoisted(row_of(m)) % kPart, column_of(n)), group);
      }
    }
  }
  // kPart columns, as the left factor of a product over the columns.
  template <int kPart>
  __device__ __forceinline__ void store_by_column(uint32 to_s, int part) const {
    static_assert(kPart % (kThreadColumns * kColumnGroup) == 0, "whole groups of all threads");
#pragma unroll
    for (int m = 0; m < kThreadM; m += kRowGroup) {
#pragma unroll
      for (int n = 0; n < kThreadN; n++) {
        if (n * kThreadColumns / kPart != part) continue;
        float group[kRowGroup];
#pragma unroll
        for (int i = 0; i < kRowGroup; i++) group[i] = c[m + i][n];
        st_shared(to_s + slot_offset<kRows>(not_hoisted(column_of(n)) % kPart, row_of(m)), group);
      }
    }
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
