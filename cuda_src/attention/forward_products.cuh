// The two products of the forward, of one warp with one key tile: S = Q K^T and O += P V.
//
// The columns of K and V go in groups of four chunks (32 columns): one ldmatrix for each 8 keys of a group, whose
// fragments serve all of the warp's m16 tiles.
#pragma once

#include "../common/swizzle.cuh"
#include "lean_softmax.cuh"
#include "score_fragment.cuh"

// x3 does not exist: x4 then reads one matrix twice.
__host__ __device__ constexpr int matrices_loaded(int count) { return count == 3 ? 4 : count; }

// Steps 4 group to 4 group + kCount - 1 of S += Q K^T.
template <int kCount, typename KTile, typename Scores, int kSteps>
__device__ __forceinline__ void multiply_q_k_group(Scores& scores, const uint32 (&q)[Scores::kMTiles][kSteps][2],
                                                   uint32 k_s, int group) {
#pragma unroll
  for (int n = 0; n < Scores::kNTiles; n++) {
    uint32 b[matrices_loaded(kCount)];
    ldmatrix(b, k_s + n * 8 * KTile::kRowBytes);
#pragma unroll
    for (int step = 0; step < kCount; step++) {
#pragma unroll
      for (int i = 0; i < Scores::kMTiles; i++) mma_m16n8k8(scores.s[i][n], q[i][group * 4 + step], b[step]);
    }
  }
}

// S = Q K^T, with Q as A fragments.
template <typename KTile, typename Scores, int kSteps>
__device__ __forceinline__ void multiply_q_k(Scores& scores, const uint32 (&q)[Scores::kMTiles][kSteps][2],
                                             const FragmentAddress<KTile>& fragment, uint32 k_s) {
  constexpr int kTail = kSteps % 4;
  scores.clear();
#pragma unroll
  for (int group = 0; group < kSteps / 4; group++) {
    multiply_q_k_group<4, KTile>(scores, q, k_s + fragment.of_group(group), group);
  }
  if constexpr (kTail != 0) multiply_q_k_group<kTail, KTile>(scores, q, k_s + fragment.tail, kSteps / 4);
}

// Output columns 32 group to 32 group + 8 kCount - 1 of O += P V, for the 8 keys of n8 tile n.
template <int kCount, typename Packed, int kMTiles, int kOutTiles>
__device__ __forceinline__ void multiply_p_v_group(float (&acc)[kMTiles][kOutTiles][4], const Packed& packed, int n,
                                                   uint32 v_s, int group) {
  uint32 b[matrices_loaded(kCount)];
  ldmatrix_trans(b, v_s);
#pragma unroll
  for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) mma_m16n8k8(acc[i][group * 4 + tile], packed.p[i][n], b[tile]);
  }
}

// O += P V.
template <typename VTile, typename Fragment, int kMTiles, int kOutTiles>
__device__ __forceinline__ void multiply_p_v(float (&acc)[kMTiles][kOutTiles][4],
                                             const PackedProbabilities<Fragment>& packed,
                                             const FragmentAddress<VTile>& fragment, uint32 v_s) {
  constexpr int kTail = kOutTiles % 4;
#pragma unroll
  for (int n = 0; n < Fragment::kNTiles; n++) {
    const uint32 keys_s = v_s + n * 8 * VTile::kRowBytes;
#pragma unroll
    for (int group = 0; group < kOutTiles / 4; group++) {
      multiply_p_v_group<4>(acc, packed, n, keys_s + fragment.of_group(group), group);
    }
    if constexpr (kTail != 0) multiply_p_v_group<kTail>(acc, packed, n, keys_s + fragment.tail, kOutTiles / 4);
  }
}
