// The product O += P V of a warp with a tile of keys, and the accumulators of its tensor-core instructions: float32, or
// float16 within a tile, whose sums are then added to O in float32. GeForce RTX 20xx GPUs run mma with float16
// accumulators at twice the rate; a T4 does not.
//
// Float16 sums have limits. P must leave room for them: a thread's P of a tile add up to at most kLargestSum (64), so
// those of a row, which four threads have, to 256, and with |v| up to MAX_HALF_SUM_VALUE in ops/attention/options.py
// (250) no sum comes near 65504. Where all keys of a tile weigh the same, P = 1 is therefore stored as 256 / tile_k.
// What packing flushes is 2^-14 of that unit: a P below 2^-18 of the row's largest with 16 keys a tile, 2^-17 with 32,
// 2^-16 with 48 and 64. Each mma rounds its sum to nearest: 2^-11 of it, tile_k / 8 times a tile
// (ops/attention/bounds.py).
#pragma once

#if !defined(ACCUMULATOR)
#error "ACCUMULATOR comes from a launch-configuration table"
#endif
#include "products.cuh"
#include "softmax.cuh"

constexpr int kLargestSum = 64;

// How P is kept where float16 accumulators add up kKeys keys, whose softmax comes in kSteps.
template <int kKeys, int kSteps>
struct HalfSumsRange {
  static_assert(kKeys >= 16 && kKeys <= 256, "sums of 16 to 256 keys");
  static constexpr int kThreadKeys = kKeys / 4;  // that a thread holds of a row
  __host__ __device__ static constexpr int log2_down(int x) { return x < 2 ? 0 : 1 + log2_down(x / 2); }

  __device__ static constexpr float headroom_log2() { return log2_down(kLargestSum / kThreadKeys); }
  __device__ static constexpr float shift_log2() { return headroom_log2() - 112.f; }
  __device__ static constexpr float spare_log2() { return 0.f; }
  __device__ static constexpr float largest_packed() { return kLargestSum / kSteps / kUnshift; }
  __device__ static constexpr float unshift() { return kUnshift; }
  __device__ __forceinline__ static uint32 pack(float x, float y) { return pack_shifted(x, y); }
};

template <typename Accumulator, int kKeys, int kSteps = 1>
struct OutputSums;

template <int kKeys, int kSteps>
struct OutputSums<float32, kKeys, kSteps> {
  template <typename Scalar>
  using Range = PackedRange<Scalar>;

  // acc += P V, which comes in steps of kNTiles fragments, 8 keys after 8 keys, group of columns by group. The first
  // row of V is at v_s.
  template <typename Scalar, typename Tile, int kNTiles, int kMTiles, int kOutTiles>
  __device__ __forceinline__ static void add(float (&acc)[kMTiles][kOutTiles][4],
                                             const uint32 (&p)[kSteps][kNTiles][kMTiles][2], uint32 v_s,
                                             const FragmentAddress<Tile>& address) {
#pragma unroll
    for (int n = 0; n < kSteps * kNTiles; n++) {
      add_step<0, Scalar>(acc, p[n / kNTiles][n % kNTiles], v_s + n * 8 * Tile::kRowBytes, address);
    }
  }

 private:
  template <int kGroup, typename Scalar, typename Tile, int kMTiles, int kOutTiles>
  __device__ __forceinline__ static void add_step(float (&acc)[kMTiles][kOutTiles][4], const uint32 (&p)[kMTiles][2],
                                                  uint32 v_s, const FragmentAddress<Tile>& address) {
    add_product_nn<kGroup, Scalar>(acc, p, v_s, address);
    if constexpr (kGroup + 1 < chunk_groups(kOutTiles)) add_step<kGroup + 1, Scalar>(acc, p, v_s, address);
  }
};

template <int kKeys, int kSteps>
struct OutputSums<float16, kKeys, kSteps> {
  template <typename Scalar>
  using Range = HalfSumsRange<kKeys, kSteps>;

  // The same: a group of columns over all keys of the tile in float16, then added to acc.
  template <typename Scalar, typename Tile, int kNTiles, int kMTiles, int kOutTiles>
  __device__ __forceinline__ static void add(float (&acc)[kMTiles][kOutTiles][4],
                                             const uint32 (&p)[kSteps][kNTiles][kMTiles][2], uint32 v_s,
                                             const FragmentAddress<Tile>& address) {
    static_assert(8 * kSteps * kNTiles == kKeys, "P has room for sums of kKeys keys");
    add_group<0>(acc, p, v_s, address);
  }

 private:
  template <int kGroup, typename Tile, int kNTiles, int kMTiles, int kOutTiles>
  __device__ __forceinline__ static void add_group(float (&acc)[kMTiles][kOutTiles][4],
                                                   const uint32 (&p)[kSteps][kNTiles][kMTiles][2], uint32 v_s,
                                                   const FragmentAddress<Tile>& address) {
    constexpr int kCount = chunks_in_group(kOutTiles, kGroup);
    uint32 sums[kMTiles][kCount][2] = {};
#pragma unroll
    for (int n = 0; n < kSteps * kNTiles; n++) {
      uint32 b[matrices_loaded(kCount)];
      ldmatrix_trans(b, v_s + n * 8 * Tile::kRowBytes + address.of_group(kGroup));
#pragma unroll
      for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) mma_m16n8k8_f16(sums[i][tile], p[n / kNTiles][n % kNTiles][i], b[tile]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) promote(acc[i][kGroup * kGroupChunks + tile], sums[i][tile]);
    }
    if constexpr (kGroup + 1 < chunk_groups(kOutTiles)) add_group<kGroup + 1>(acc, p, v_s, address);
  }

  // acc += the float16 sums of the same places. A product with the identity matrix does it in one instruction, which
  // keeps a GeForce's tensor cores busy for as long as two steps of 8 keys; packed accumulators are an A operand. (What
  // is not finite then reaches the row's other columns of the eight as NaN.) Eight instructions that convert and add
  // take half of that time, and registers: they are faster for sums of 16 keys, or of 32 in two softmaxes.
  static constexpr bool kByProduct = kKeys / kSteps > 16;
  __device__ __forceinline__ static uint32 identity() {
    const int diagonal = lane_index() / 4 - lane_index() % 4 * 2;  // the column, from the first of the lane's two rows
    return diagonal == 0 ? 0x3c00u : diagonal == 1 ? 0x3c000000u : 0u;
  }
  __device__ __forceinline__ static void promote(float (&acc)[4], const uint32 (&sums)[2]) {
    if constexpr (kByProduct) {
      mma_m16n8k8(acc, sums, identity());
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 both = unpack_halves(sums[half]);
        acc[2 * half] += both.x;
        acc[2 * half + 1] += both.y;
      }
    }
  }
};
