// A rotated pair of features, and how a thread reads its cosines and sines.
#pragma once

#include "../common/vec.cuh"

// One rotated feature of a pair; `other` is the pair's other feature. `turn` is the angle's sine for the second feature
// of the pair and minus the sine for the first. Written out, so that every kernel that rotates gives the same bits.
__device__ __forceinline__ float rotated(float x, float other, float cos, float signed_sin) {
  return __fmaf_rn(x, cos, other * signed_sin);
}

// kItems neighbouring items of a table: at most 16 bytes at a time if they are aligned (kWhole), otherwise item by
// item.
template <bool kWhole, int kItems, typename Table>
__device__ __forceinline__ void load_table(float (&values)[kItems], const Table* source) {
  constexpr int kMost = kWhole ? kVectorBytes / static_cast<int>(sizeof(Table)) : 1;
  constexpr int kPiece = kItems < kMost ? kItems : kMost;
#pragma unroll
  for (int first = 0; first < kItems; first += kPiece) {
    float piece[kPiece];
    load_vec(piece, source + first);
#pragma unroll
    for (int i = 0; i < kPiece; i++) values[first + i] = piece[i];
  }
}

// How kernels that own whole heads rotate them: strides in items, of tables and of positions, and R/2. Field for field
// HEAD_ROTATION in cupyattn/ops/attention/structs.
struct HeadRotationParams {
  int64 cos_stride, sin_stride, table_length;
  int64 positions_batch, positions_seq;
  int32 half, positions_are_int64;
};

// Tables of Table, and optional positions of tokens. With void nothing is rotated.
template <typename Table, bool kInterleaved, bool kWhole>
struct HeadRotation {
  static constexpr bool kThere = true;

  const Table *cos_g, *sin_g;
  const void* positions_g;
  const HeadRotationParams& params;

  // The position of a token, `counted` if no positions were given.
  __device__ __forceinline__ int64 position(int64 batch, int64 token, int64 counted) const {
    const int64 at = batch * params.positions_batch + token * params.positions_seq;
    if (positions_g == nullptr) return counted;
    return params.positions_are_int64 ? static_cast<const int64*>(positions_g)[at]
                                      : static_cast<const int*>(positions_g)[at];
  }

  // Rotate kItems neighbouring features of a head, from a column that is a multiple of kItems on; kWhole if R/2 (R,
  // interleaved) is one too. The pairs' other features are read from head_g. At a position outside of the tables the
  // features become NaN.
  template <int kItems, typename Scalar>
  __device__ __forceinline__ void rotate(float (&x)[kItems], const Scalar* head_g, int column, int64 position) const {
    if (column >= 2 * params.half) return;
    constexpr int kAngles = kInterleaved ? kItems / 2 : kItems;
    const bool known = position >= 0 && position < params.table_length, second = column >= params.half;
    float cos[kAngles], sin[kAngles], other[kItems];
#pragma unroll
    for (int i = 0; i < kAngles; i++) cos[i] = kNaN, sin[i] = 0.f;
    const Table *cos_row_g = cos_g + position * params.cos_stride, *sin_row_g = sin_g + position * params.sin_stride;
    if constexpr (kWhole) {
      const int pair = kInterleaved ? column / 2 : second ? column - params.half : column;
      if (known) {
        load_table<true>(cos, cos_row_g + pair);
        load_table<true>(sin, sin_row_g + pair);
      }
      if constexpr (!kInterleaved) load_vec(other, head_g + (second ? pair : column + params.half));
    } else {
#pragma unroll
      for (int i = 0; i < kAngles; i++) {
        const int own = kInterleaved ? column + 2 * i : column + i;
        if (own >= 2 * params.half) continue;
        const int pair = kInterleaved ? own / 2 : own < params.half ? own : own - params.half;
        if (known) cos[i] = to_float(cos_row_g[pair]), sin[i] = to_float(sin_row_g[pair]);
        if constexpr (!kInterleaved) other[i] = to_float(head_g[own < params.half ? own + params.half : pair]);
      }
    }
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < kItems; i++) other[i] = x[i ^ 1];
    }
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      if (!kWhole && column + i >= 2 * params.half) continue;
      const bool is_second = kInterleaved ? i % 2 == 1 : kWhole ? second : column + i >= params.half;
      const int angle = kInterleaved ? i / 2 : i;
      x[i] = rotated(x[i], other[i], cos[angle], is_second ? sin[angle] : -sin[angle]);
    }
  }
};

template <bool kInterleaved, bool kWhole>
struct HeadRotation<void, kInterleaved, kWhole> {
  static constexpr bool kThere = false;

  const void *cos_g, *sin_g, *positions_g;
  const HeadRotationParams& params;

  __device__ __forceinline__ int64 position(int64, int64, int64 counted) const { return counted; }
  template <typename Items, typename Scalar>
  __device__ __forceinline__ void rotate(Items&, const Scalar*, int, int64) const {}
};
