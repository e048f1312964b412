// Products of one warp's rows with tiles of 16 keys, on tensor cores: S^T = K Q^T and O^T = V^T P^T, so that keys (then
// columns of V) fill the m16 side of mma.m16n8k8 and the few query rows its n8 side.
//
// K comes by loads of 16 bytes straight into A fragments: lane (g, t) has items 8 t to 8 t + 7 of each 32 of rows g and
// g + 8, so the k of a product is permuted, and q's alike. V comes by loads of 16 bytes too, two rows a lane, and a byte
// permute pairs them: the rows of O^T are permuted so that a lane has eight neighbouring columns. P^T is turned by one
// movmatrix per 8 keys. S^T and O^T have one map from rows to lanes, so a rescale needs no shuffle. No shared memory.
#pragma once

#include "../../common/mma.cuh"
#include "../../common/pack.cuh"
#include "block_feed.cuh"
#include "query_rows.cuh"

__device__ __forceinline__ uint32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <int kHeadDim, int kRows_>
struct TensorCoreRows {
  using Scalar = float16;
  static constexpr int kRows = kRows_, kRowTiles = kRows / 8;
  static constexpr int kPassRows = kHeadDim <= 128 ? 8 : 4;  // that pass through shared memory at once
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kLaneRows = 2 * kRowTiles, kLaneKeys = 2;
  static constexpr int kRowLanes = 4;  // neighbouring lanes that have different rows
  static constexpr int kColumnTiles = kHeadDim / 16;
  // Of longer rows only one of K and V fits into registers: loads do not run ahead into the next tile.
  static constexpr bool kAhead = kHeadDim <= 128;
  static_assert(kRows % 8 == 0, "whole tiles of rows");
  static_assert(kHeadDim % 64 == 0, "lanes load V in pieces of 8 columns, eight side by side");

  uint32 q[kRowTiles][kHeadDim / 8];
  uint4 k[2][kHeadDim / 32];     // rows g and g + 8
  uint4 v[2][2][kHeadDim / 64];  // rows 8 half + 2 t + e
  float s[kRowTiles][4];
  float acc[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ static int g() { return lane_index() / 4; }
  __device__ __forceinline__ static int t() { return lane_index() % 4; }
  __device__ __forceinline__ static int row_of(int i) { return i / 2 * 8 + 2 * t() + i % 2; }
  __device__ __forceinline__ static int key_of(int j) { return g() + 8 * j; }
  __device__ __forceinline__ float& score(int i, int j) { return s[i / 2][2 * j + i % 2]; }

  __device__ __forceinline__ void begin(const SegmentRows& rows, const Scalar* q_g) {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
      const int row = 8 * n + g();
      const Scalar* lane_g = rows.q(q_g, min(row, rows.count - 1)) + 8 * t();
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; i++) {
        uint4 items = make_uint4(0, 0, 0, 0);
        if (row < rows.count) items = ld_global_v4(reinterpret_cast<const void*>(lane_g + 32 * i));
#pragma unroll
        for (int x = 0; x < 4; x++) q[n][4 * i + x] = word_of(items, x);
      }
#pragma unroll
      for (int c = 0; c < kColumnTiles; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][c][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void load_k(const Scalar* tile_g, int64 row_stride) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Scalar* lane_g = tile_g + (8 * half + g()) * row_stride + 8 * t();
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; i++) k[half][i] = ld_global_stream_v4(lane_g + 32 * i);
    }
  }

  __device__ __forceinline__ void load_v(const Scalar* tile_g, int64 row_stride) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const Scalar* lane_g = tile_g + (8 * half + 2 * t() + e) * row_stride + 8 * g();
#pragma unroll
        for (int i = 0; i < kHeadDim / 64; i++) v[half][e][i] = ld_global_stream_v4(lane_g + 64 * i);
      }
    }
  }

  // Rows of V from `keys` on become zeros: a slot that is not used may hold NaN, of which 0 times would be NaN.
  __device__ __forceinline__ void clear_v(int keys) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (8 * half + 2 * t() + e < keys) continue;
#pragma unroll
        for (int i = 0; i < kHeadDim / 64; i++) v[half][e][i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(const Scalar*, int64) {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
      float even[4] = {0.f, 0.f, 0.f, 0.f}, odd[4] = {0.f, 0.f, 0.f, 0.f};  // two chains: half the latency
#pragma unroll
      for (int i = 0; i < kHeadDim / 32; i++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const uint32 a[2] = {word_of(k[0][i], x), word_of(k[1][i], x)};
          mma_m16n8k8(x % 2 == 0 ? even : odd, a, q[n][4 * i + x]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) s[n][e] = even[e] + odd[e];
    }
  }

  __device__ __forceinline__ void rescale(const float (&factor)[kLaneRows]) {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][c][e] *= factor[2 * n + e % 2];
      }
    }
  }

  // acc += P V, with P in place of the scores.
  __device__ __forceinline__ void add_values(const Scalar*, int64, int) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32 p[kRowTiles];
#pragma unroll
      for (int n = 0; n < kRowTiles; n++) p[n] = movmatrix_trans(pack_halves(s[n][2 * half], s[n][2 * half + 1]));
#pragma unroll
      for (int i = 0; i < kHeadDim / 64; i++) {
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const uint32 first = word_of(v[half][0][i], x), second = word_of(v[half][1][i], x);
          const uint32 a[2] = {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
#pragma unroll
          for (int n = 0; n < kRowTiles; n++) mma_m16n8k8(acc[n][4 * i + x], a, p[n]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish() {}

  // Rows of a pass to shared memory, kStride floats from one to the next.
  template <int kStride>
  __device__ __forceinline__ void store(int pass, float* rows_s) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int row = 8 * n + 2 * t() + e - pass * kPassRows;
        if (8 * n / kPassRows > pass || (8 * n + 7) / kPassRows < pass || row < 0 || row >= kPassRows) continue;
        float* row_s = rows_s + row * kStride + 8 * g();
#pragma unroll
        for (int i = 0; i < kHeadDim / 64; i++) {
          const float (*c)[4] = &acc[n][4 * i];
          *reinterpret_cast<float4*>(row_s + 64 * i) = make_float4(c[0][e], c[0][e + 2], c[1][e], c[1][e + 2]);
          *reinterpret_cast<float4*>(row_s + 64 * i + 4) = make_float4(c[2][e], c[2][e + 2], c[3][e], c[3][e + 2]);
        }
      }
    }
  }
};
