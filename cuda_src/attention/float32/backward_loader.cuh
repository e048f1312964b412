// How the factors of the float32 backward's products come to shared memory: a step ahead of the arithmetic, each
// thread its share, from global memory to registers and later from there, as float32, to the buffer that is not being
// multiplied. So the latency of the loads passes under the arithmetic, and a step costs one barrier.
#pragma once

#include "../../common/vec.cuh"
#include "backward_products.cuh"

constexpr int kBufferBytes = 8192;
constexpr int kBufferFloats = kBufferBytes / sizeof(float);
constexpr int kBufferQuads = kBufferFloats / 4 / kProductThreads;  // of a thread, to fill a buffer

// Four items of a row from column `col` on, of which `cols` exist; what does not is zeros and not read. kVec is 4 for
// rows aligned to four items, otherwise 1.
template <int kVec, typename Scalar>
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

// The rows of a global matrix from row 0 on, `rows` of them.
template <typename Scalar>
struct Rows {
  const Scalar* first_g;
  int64 stride;  // in items
  int rows;
};

// kRows rows, of whose kCols columns a step takes kDepth: the columns are the depth.
template <typename Scalar, int kRows, int kCols, int kDepth_, int kVec>
struct ColumnSlices {
  static constexpr int kDepth = kDepth_;
  static constexpr int kSteps = div_up(kCols, kDepth);
  static constexpr int kBytes = kDepth * kRows * sizeof(float);
  static constexpr int kQuads = kRows * kDepth / 4 / kProductThreads;
  static_assert(kQuads * 4 * kProductThreads == kRows * kDepth, "whole passes");

  Rows<Scalar> from;

  __device__ __forceinline__ void fetch(float4* quads, int step) const {
    const int first = step * kDepth + col(), cols = kCols % kDepth == 0 ? first + 4 : kCols;
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      quads[i] = row(i) < from.rows ? load_four<kVec>(from.first_g + row(i) * from.stride, first, cols)
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  __device__ __forceinline__ static void store(const float4* quads, uint32 buffer_s) {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      const float x[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
      const uint32 at_s = buffer_s + slot_offset<kRows>(col(), row(i));
#pragma unroll
      for (int c = 0; c < 4; c++) st_shared_u32(at_s + c * (kRows * sizeof(float)), __float_as_uint(x[c]));
    }
  }

 private:
  __device__ __forceinline__ static int row(int i) {
    return (not_hoisted(threadIdx.x) + i * kProductThreads) / (kDepth / 4);
  }
  __device__ __forceinline__ static int col() { return threadIdx.x % (kDepth / 4) * 4; }
};

// Both factors of a product over columns, one after the other.
template <typename A, typename B>
struct SlicePair {
  static constexpr int kDepth = A::kDepth;
  static constexpr int kSteps = A::kSteps;
  static constexpr uint32 kSecondAt = A::kBytes;
  static_assert(A::kBytes + B::kBytes <= kBufferBytes && A::kQuads + B::kQuads <= kBufferQuads, "larger than a buffer");

  A a;
  B b;

  __device__ __forceinline__ void fetch(float4* quads, int step) const {
    a.fetch(quads, step);
    b.fetch(quads + A::kQuads, step);
  }
  __device__ __forceinline__ static void store(const float4* quads, uint32 buffer_s) {
    A::store(quads, buffer_s);
    B::store(quads + A::kQuads, buffer_s + A::kBytes);
  }
};

// kDepth of kRows rows to a step, of each kColumns columns: the rows are the depth. `cols` of the columns exist.
template <typename Scalar, int kRows, int kColumns, int kVec>
struct RowPanels {
  static constexpr int kDepth = kColumns > 256 ? 4 : kColumns > 128 ? 8 : 16;
  static constexpr int kSteps = kRows / kDepth;
  static constexpr int kQuads = kDepth * kColumns / 4 / kProductThreads;
  static_assert(kDepth * kColumns <= kBufferFloats && kQuads * 4 * kProductThreads == kDepth * kColumns,
                "whole passes");

  Rows<Scalar> from;
  int cols;

  __device__ __forceinline__ void fetch(float4* quads, int step) const {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      const int row = step * kDepth + at(i) / kColumns, col = at(i) % kColumns;
      quads[i] = row < from.rows ? load_four<kVec>(from.first_g + row * from.stride, col, cols)
                                 : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  __device__ __forceinline__ static void store(const float4* quads, uint32 buffer_s) {
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
      const float x[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
      st_shared(buffer_s + slot_offset<kColumns>(at(i) / kColumns, at(i) % kColumns), x);
    }
  }

 private:
  __device__ __forceinline__ static int at(int i) { return (not_hoisted(threadIdx.x) + i * kProductThreads) * 4; }
};

// Two buffers of shared memory: one is multiplied, the other filled.
struct Buffers {
  uint32 present_s, both_s;    // both_s: the sum of the two addresses
  float4 quads[kBufferQuads];  // on the way

  __device__ __forceinline__ explicit Buffers(const float (&buffers)[2][kBufferFloats])
      : present_s(shared_address(buffers[0])), both_s(shared_address(buffers[0]) + shared_address(buffers[1])) {}

  // The first step of a loop.
  template <typename Loader>
  __device__ __forceinline__ void begin(const Loader& loader) {
    loader.fetch(quads, 0);
    loader.store(quads, present_s);
    __syncthreads();  // buffer: written
  }

  // multiply(buffer_s, number) for the steps of `loader`, the first of which is in the present buffer. At the end that
  // is the first one of `next`.
  template <typename Loader, typename Next, typename Multiply>
  __device__ __forceinline__ void run(const Loader& loader, const Next& next, Multiply multiply) {
#pragma unroll 1
    for (int number = 0; number < Loader::kSteps; number++) {
      const bool last = number + 1 == Loader::kSteps;
      if (last) {
        next.fetch(quads, 0);
      } else {
        loader.fetch(quads, number + 1);
      }
      multiply(present_s, number);
      const uint32 other_s = both_s - present_s;
      if (last) {
        next.store(quads, other_s);
      } else {
        loader.store(quads, other_s);
      }
      __syncthreads();  // buffers: this one has been read, the other one written
      present_s = other_s;
    }
  }
};
