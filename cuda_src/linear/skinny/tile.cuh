// The common part of the skinny kernels, for few rows of x: sizes and strides, the columns of w of a tile, loads of
// pairs of 16-bit floats, and the epilogue of a finished sum.
//
//   z = x w + b,   out = act(z) + residual;   gated: out = act(z_gate) z_up + residual
//
// Shapes    x (M, K), w (K, W) by rows or by columns, b (W), residual and out (M, N), preactivation z (M, W). W is N,
//           or 2 N with a gated activation: N columns of the gate, then N of up.
#pragma once

#include "../../common/activations.cuh"
#include "../../common/streaming.cuh"

// Field for field SKINNY_PARAMS of cupyattn/ops/linear/kernels_skinny.py. Strides are in items, from one contiguous
// line to the next: a row, or a column of a w that is contiguous along K.
struct ThinParams {
  int64 x_stride, w_stride, residual_stride, preactivation_stride, out_stride;
  int rows, inner, outer;  // M, K, N
  int splits;              // parts of K, each summed by separate CTAs
};

// A tile of kColumns columns of w. If gated, its first half are columns of the gate and its other half the same columns
// of up, so that one CTA has both sums of a result.
template <int kColumns_, bool kGated_>
struct ColumnTile {
  static constexpr int kColumns = kColumns_;
  static constexpr bool kGated = kGated_;
  static constexpr int kResults = kGated ? kColumns / 2 : kColumns;  // columns of out

  // Column `column` of the tile whose first result is `first`: its result, and its column in w and b.
  __device__ __forceinline__ static int result(int first, int column) { return first + column % kResults; }
  __device__ __forceinline__ static int64 half(int column, int outer) {
    return kGated && column >= kResults ? outer : 0;
  }
};

// The work of a CTA: the columns of kResults results, over bursts of kBurstItems items of K. Without a split of K there
// is no division before the first load.
template <bool kSplit, int kResults, int kBurstItems>
struct CtaPart {
  int split = 0, first, from = 0, to;  // split of K, first result, first burst, end of bursts

  __device__ __forceinline__ explicit CtaPart(const ThinParams& params, uint32 cta = blockIdx.x) {
    first = cta * kResults;
    to = (params.inner + kBurstItems - 1) / kBurstItems;
    if constexpr (kSplit) {
      const uint32 bursts = to, tiles = (params.outer + kResults - 1) / kResults;
      split = cta / tiles;
      first -= split * tiles * kResults;
      from = bursts * split / params.splits;
      to = bursts * (split + 1) / params.splits;
    }
  }

  __device__ __forceinline__ int end(const ThinParams& params) const { return min(params.inner, to * kBurstItems); }
};

// kItems neighbouring items of 16 bits, two to a word; those from `count` on become zeros and are not read. With
// kVec > 1 all of them exist or none. kOnce: no other warp reads them.
template <int kItems, int kVec, bool kOnce, typename Scalar>
__device__ __forceinline__ void load_pairs(uint32 (&pairs)[kItems / 2], const Scalar* source, int count) {
  static_assert(kItems == 2 || kItems == 4 || kItems == 8, "4, 8 or 16 bytes");
  if constexpr (kVec == 1) {
#pragma unroll
    for (int i = 0; i < kItems; i += 2) {
      const uint32 low = ld_u16_if(source + i, i < count), high = ld_u16_if(source + i + 1, i + 1 < count);
      pairs[i / 2] = high << 16 | low;
    }
  } else if constexpr (kItems == 8) {
    const uint4 v = kOnce ? ld_once_v4(source, count > 0) : ld_v4_if(source, count > 0);
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  } else if constexpr (kItems == 4) {
    const uint2 v = ld_once_v2(source, count > 0);
    pairs[0] = v.x, pairs[1] = v.y;
  } else {
    pairs[0] = ld_once_u32(source, count > 0);
  }
}

__device__ __forceinline__ float2 unpack(uint32 pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }

// An item of b as it is stored. It is converted when it is used: a conversion here would wait for the load.
template <typename Scalar>
__device__ __forceinline__ uint16 load_bias(const Scalar* b_g, int64 column, bool wanted) {
  return ld_u16_if(b_g + column, wanted && b_g != nullptr);
}
template <typename Scalar = float16>
__device__ __forceinline__ float bias_of(uint16 bits) {
  return to_float(*reinterpret_cast<const Scalar*>(&bits));
}

// The stores for one item of out, or of a split's sums. Absent arrays are null.
template <typename Activation, bool kGated, typename Result, typename Item = float16>
struct Epilogue {
  const Item* residual_g;
  Item* preactivation_g;
  Result* out_g;

  // z of the column, and if gated z of up.
  __device__ __forceinline__ void store(const ThinParams& params, int row, int column, float z, float up) const {
    if (preactivation_g != nullptr) {
      Item* row_g = preactivation_g + row * params.preactivation_stride;
      row_g[column] = from_float<Item>(z);
      if (kGated) row_g[static_cast<int64>(params.outer) + column] = from_float<Item>(up);
    }
    float y = Activation::value(z);
    if (kGated) y *= up;
    if (residual_g != nullptr) y += to_float(residual_g[row * params.residual_stride + column]);
    out_g[row * params.out_stride + column] = from_float<Result>(y);
  }
};
