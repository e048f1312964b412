// Row-wise kernels: arrays of any rank whose last axis is contiguous, as rows of `length` items.
//
// A row belongs to LANES neighbouring threads: part of a warp, or whole warps. They process it in segments of
// LANES vectors, and a thread owns one vector of each segment. A resident row (up to STRIPS segments) stays in
// registers between the passes over it. A longer row is read again in each pass.
#pragma once

#include "reduce.cuh"
#include "vec.cuh"

constexpr int kOuterAxes = 4;  // axes before the last, after merging

// The fields are those of the structured dtype rows_params(arrays) in cupyattn/runtime/structs.py. Absent axes have
// length 1 and come last, so that rows of arrays without gaps need no division.
template <int kArrays>
struct RowsParams {
  int64 shape[kOuterAxes];
  int64 strides[kArrays][kOuterAxes];  // in items; also of arrays with one item for each row
  int64 rows, length;
};

template <int kArrays>
__device__ __forceinline__ int64 row_offset(const RowsParams<kArrays>& params, int array, int64 row) {
  if (params.shape[1] == 1) return row * params.strides[array][0];  // there is only one axis
  int64 offset = 0;
  constexpr int kUnrolled = kArrays == 1 ? kOuterAxes : 1;  // a loop would copy small parameters to the stack
#pragma unroll kUnrolled
  for (int axis = kOuterAxes - 1; axis > 0; axis--) {
    if (params.shape[axis] == 1) continue;
    offset += row % params.shape[axis] * params.strides[array][axis];
    row /= params.shape[axis];
  }
  return offset + row * params.strides[array][0];
}

// The offsets of a row in the first kCount arrays, with one loop over the axes for all.
template <int kCount, int kArrays>
__device__ __forceinline__ void row_offsets(int64 (&offsets)[kCount], const RowsParams<kArrays>& params, int64 row) {
  static_assert(kCount <= kArrays, "of those that there are");
#pragma unroll
  for (int array = 0; array < kCount; array++) offsets[array] = 0;
  if (params.shape[1] != 1) {
#pragma unroll 1
    for (int axis = kOuterAxes - 1; axis > 0; axis--) {
      if (params.shape[axis] == 1) continue;
      const int64 at = row % params.shape[axis];
#pragma unroll
      for (int array = 0; array < kCount; array++) offsets[array] += at * params.strides[array][axis];
      row /= params.shape[axis];
    }
  }
#pragma unroll
  for (int array = 0; array < kCount; array++) offsets[array] += row * params.strides[array][0];
}

template <int kThreads_, int kLanes_, int kSegments_, int kVec_, bool kResident_>
struct RowTraits {
  static constexpr int kThreads = kThreads_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kVec = kVec_;
  static constexpr bool kResident = kResident_;  // the whole row fits in the registers of its threads
  static constexpr int kHeldSegments = kResident ? kSegments_ : 1;
  static constexpr int kSegments = kSegments_;  // segments in registers, or in a batch: loaded before the first is used
  static constexpr int kRowsPerCta = kThreads / kLanes;
  static constexpr int kSegmentItems = kLanes * kVec;

  // The number of segments of a row. It is a constant for a resident row, so that loops unroll and it stays in
  // registers.
  static __device__ __forceinline__ int64 segments(int64 length) {
    return kResident ? kHeldSegments : (length + kSegmentItems - 1) / kSegmentItems;
  }
  // The number of batches of kSegments segments; a resident row is one batch.
  static __device__ __forceinline__ int64 batches(int64 length) {
    constexpr int kBatchItems = kSegmentItems * kSegments;
    return kResident ? 1 : (length + kBatchItems - 1) / kBatchItems;
  }
  static __device__ __forceinline__ constexpr int held(int64 segment) {
    return kResident ? static_cast<int>(segment) : 0;
  }

  static_assert(kThreads % kLanes == 0, "whole rows");
  static_assert(kLanes <= kWarpSize || kLanes % kWarpSize == 0, "a row belongs to a part of a warp or to whole warps");
  static_assert(kThreads % kWarpSize == 0 && kThreads <= 1024, "whole warps");
};

// Reduce over the threads of one row. All threads of the CTA must call it.
template <typename Op, typename Rows>
__device__ __forceinline__ float row_reduce(float x, float* partial_s) {
  if constexpr (Rows::kLanes <= kWarpSize) {
    return warp_reduce<Op, Rows::kLanes>(x);
  } else {
    static_assert(Rows::kLanes == Rows::kThreads, "of several rows in a CTA, each of many warps: RowSums");
    return cta_reduce<Op, Rows::kThreads>(x, partial_s);
  }
}

// The first column of this thread's vector of `segment`.
template <typename Rows>
__device__ __forceinline__ int64 segment_column(int64 segment) {
  return segment * Rows::kSegmentItems + threadIdx.x % Rows::kLanes * Rows::kVec;
}

// Load a segment. Columns from `length` on are `absent`. With kVec > 1, `length` is a multiple of it.
template <typename Rows, typename Scalar>
__device__ __forceinline__ void load_segment(float (&values)[Rows::kVec], const Scalar* row_g, int64 segment,
                                             int64 length, float absent) {
  const int64 column = segment_column<Rows>(segment);
  if (column < length) {
    load_vec(values, row_g + column);
  } else {
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) values[i] = absent;
  }
}

// Load a segment of an array that broadcasts to the rows. With kWhole neighbouring columns are contiguous, and loads
// are vectors. Otherwise they are `stride` items apart, 0 if one item is for all columns. Columns from `length` on are
// 0.
template <typename Rows, bool kWhole, typename Scalar>
__device__ __forceinline__ void load_broadcast(float (&values)[Rows::kVec], const Scalar* row_g, int64 stride,
                                               int64 segment, int64 length) {
  if constexpr (kWhole) {
    load_segment<Rows>(values, row_g, segment, length, 0.f);
  } else {
    const int64 column = segment_column<Rows>(segment);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) {
      values[i] = column + i < length ? to_float(row_g[(column + i) * stride]) : 0.f;
    }
  }
}

// With kAccumulate values are added to what is there, before the one rounding.
template <typename Rows, bool kAccumulate = false, typename Scalar>
__device__ __forceinline__ void store_segment(Scalar* row_g, const float (&values)[Rows::kVec], int64 segment,
                                              int64 length) {
  const int64 column = segment_column<Rows>(segment);
  if constexpr (kAccumulate) {
    float total[Rows::kVec];
    load_segment<Rows>(total, row_g, segment, length, 0.f);
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) total[i] += values[i];
    store_segment<Rows>(row_g, total, segment, length);
  } else {
    if (column < length) store_vec(row_g + column, values);
  }
}

// A segment with the bits of memory, zeros from `length` on. So the loads of several segments, also of the next row,
// are issued before the first one is converted. (A load and its conversion under one condition would be a branch, which
// waits for the load.)
template <typename Rows, typename Scalar>
struct HeldSegment {
  using Items = Vec<Scalar, Rows::kVec>;
  WordsOf<Items> words;

  __device__ __forceinline__ void load(const Scalar* row_g, int64 segment, int64 length) {
    const int64 column = segment_column<Rows>(segment);
    words = {};
    if (column < length) words = *reinterpret_cast<const WordsOf<Items>*>(row_g + column);
  }

  __device__ __forceinline__ void get(float (&values)[Rows::kVec]) const { unpack<Scalar>(values, words); }

  // Round values to Scalar and keep them; `values` become the rounded ones.
  __device__ __forceinline__ void set(float (&values)[Rows::kVec]) {
    Items items;
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) {
      items.item[i] = from_float<Scalar>(values[i]);
      values[i] = to_float(items.item[i]);
    }
    words = *reinterpret_cast<const WordsOf<Items>*>(&items);
  }
};

// A segment of float32 in a kernel whose vectors are those of a 16-bit dtype: a thread's vector is two words.
template <typename Rows>
struct HeldFloats {
  float items[Rows::kVec];

  __device__ __forceinline__ void load(const float* row_g, int64 segment, int64 length) {
    load_segment<Rows>(items, row_g, segment, length, 0.f);
  }

  __device__ __forceinline__ void get(float (&values)[Rows::kVec]) const {
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) values[i] = items[i];
  }

  __device__ __forceinline__ void set(const float (&values)[Rows::kVec]) {
#pragma unroll
    for (int i = 0; i < Rows::kVec; i++) items[i] = values[i];
  }
};

// The number of registers of a thread for its items of one row of Scalar, and the number of registers available for
// rows: all but about 40 for addresses and intermediate values.
template <typename Rows, typename Scalar>
constexpr int kHeldRegisters =
    Rows::kHeldSegments * (Rows::kVec > 1 ? Rows::kVec * static_cast<int>(sizeof(Scalar)) / 4 : 1);
template <typename Rows>
constexpr int kFreeRegisters = (Rows::kThreads > 256 ? 65536 / Rows::kThreads : 255) - 40;

template <typename Rows>
__device__ __forceinline__ bool segment_exists(int64 segment, int64 length) {
  return segment_column<Rows>(segment) < length;
}

// A barrier of the threads of one row, which has several warps. Other rows of the CTA do not wait.
template <typename Rows>
__device__ __forceinline__ void row_barrier() {
  if constexpr (Rows::kRowsPerCta == 1) {
    __syncthreads();
  } else {
    static_assert(Rows::kRowsPerCta <= 15, "barrier 0 is the CTA's");
    bar_sync(1 + threadIdx.x / Rows::kLanes, Rows::kLanes);
  }
}

// Several sums over the threads of one row, with one barrier if it has several warps. Consecutive rows use alternating
// buffers: after the barrier of a row, the buffer of the previous row has been read by all threads.
template <typename Rows, int kSums>
struct RowSums {
  static constexpr int kWarps = Rows::kLanes <= kWarpSize ? 1 : Rows::kLanes / kWarpSize;  // of a row
  static constexpr int kWidth = Rows::kLanes <= kWarpSize ? Rows::kLanes : kWarpSize;
  float partial[2][kSums][kWarps > 1 ? Rows::kThreads / kWarpSize : 1];

  __device__ __forceinline__ void add_up(float (&sums)[kSums], int buffer) {
#pragma unroll
    for (int k = 0; k < kSums; k++) sums[k] = warp_reduce<Sum, kWidth>(sums[k]);
    if constexpr (kWarps > 1) {
      if (lane_index() == 0) {
#pragma unroll
        for (int k = 0; k < kSums; k++) partial[buffer][k][warp_index()] = sums[k];
      }
      row_barrier<Rows>();  // partial[buffer]: written by every warp of the row; the other buffer has been read
      const int warp = warp_index() / kWarps * kWarps + lane_index() % kWarps;
#pragma unroll
      for (int k = 0; k < kSums; k++) sums[k] = warp_reduce<Sum, kWarps>(partial[buffer][k][warp]);
    }
  }
};

// Sums over rows: a CTA processes rows gridDim.x * kRowsPerCta apart and writes its sum of each column to its row of
// partials_g (gridDim.x, length), which column_sums.cu adds up. A thread owns the same columns of every row, and the
// order of the additions is fixed. Resident rows are summed in registers. A CTA processes longer rows one at a time,
// and each thread adds to its own columns of partials_g.
template <typename Rows>
struct ColumnSums {
  float sum[Rows::kHeldSegments][Rows::kVec];

  // Shared memory for `store`, for one segment: row i has item i of every thread. The pitch shifts each row against the
  // banks such that a warp reads neighbouring columns without conflicts.
  static constexpr int kPitch = Rows::kThreads + (Rows::kVec > 1 ? kWarpSize / Rows::kVec : 0);
  static constexpr int kSharedFloats = Rows::kResident ? Rows::kVec * kPitch : 1;

  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) sum[segment][i] = 0.f;
    }
  }

  // Add one row's terms of a segment. `first` is true for the first row of this CTA.
  __device__ __forceinline__ void add(const float (&terms)[Rows::kVec], int64 segment, bool first, float* partial_row_g,
                                      int64 length) {
    if constexpr (Rows::kResident) {
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) sum[segment][i] += terms[i];
    } else if (segment_exists<Rows>(segment, length)) {
      float* partial_g = partial_row_g + segment_column<Rows>(segment);
      float total[Rows::kVec] = {};
      if (!first) load_vec(total, partial_g);
#pragma unroll
      for (int i = 0; i < Rows::kVec; i++) total[i] += terms[i];
      store_vec(partial_g, total);
    }
  }

  // After the last row: add the registers of all rows of the CTA, and write the sums to its row of partials_g.
  __device__ __forceinline__ void store(float* partial_row_g, int64 length, float (&columns_s)[kSharedFloats]) {
    if constexpr (Rows::kResident) {
#pragma unroll
      for (int segment = 0; segment < Rows::kHeldSegments; segment++) {
        __syncthreads();  // columns_s: the previous segment has been read
#pragma unroll
        for (int i = 0; i < Rows::kVec; i++) columns_s[i * kPitch + threadIdx.x] = sum[segment][i];
        __syncthreads();  // columns_s: written by every thread
#pragma unroll 1
        for (int item = threadIdx.x; item < Rows::kSegmentItems; item += Rows::kThreads) {
          float total = 0.f;
          for (int row = 0; row < Rows::kRowsPerCta; row++) {
            total += columns_s[item % Rows::kVec * kPitch + row * Rows::kLanes + item / Rows::kVec];
          }
          const int64 column = static_cast<int64>(segment) * Rows::kSegmentItems + item;
          if (column < length) partial_row_g[column] = total;
        }
      }
    }
  }
};
