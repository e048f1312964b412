// Products of a warp's A fragments with rows of a swizzled tile in shared memory, in groups of four chunks (32
// columns): one ldmatrix for each 8 rows of a group, whose fragments serve all of the warp's m16 tiles.
//
// The groups are template arguments, so that a caller can interleave two products and give the tensor cores more
// independent accumulators.
#pragma once

#if !defined(MMA_K)
#error "MMA_K comes from a launch-configuration table"
#endif
#include "../../common/swizzle.cuh"

static_assert(MMA_K == 8 || MMA_K == 16, "mma.m16n8k8, or from sm_80 on m16n8k16");

constexpr int kGroupChunks = 4;
__host__ __device__ constexpr int chunk_groups(int chunks) { return div_up(chunks, kGroupChunks); }

// Chunks of group `group`, of `chunks` in all.
__host__ __device__ constexpr int chunks_in_group(int chunks, int group) {
  return chunks - group * kGroupChunks < kGroupChunks ? chunks - group * kGroupChunks : kGroupChunks;
}

// x3 does not exist: x4 then reads one matrix twice.
__host__ __device__ constexpr int matrices_loaded(int chunks) { return chunks == 3 ? 4 : chunks; }

// acc[i] (16 x 8) += A[i] B^T over the columns of a group; A is 16 x 8 kSteps, B the 8 rows at rows_s.
template <int kGroup, typename Tile, int kMTiles, int kSteps>
__device__ __forceinline__ void add_product_nt(float (&acc)[kMTiles][4], const uint32 (&a)[kMTiles][kSteps][2],
                                               uint32 rows_s, const FragmentAddress<Tile>& address) {
  if constexpr (kGroup < chunk_groups(kSteps)) {
    constexpr int kCount = chunks_in_group(kSteps, kGroup);
    uint32 b[matrices_loaded(kCount)];
    ldmatrix(b, rows_s + address.of_group(kGroup));
    constexpr int kPaired = MMA_K == 16 ? kCount / 2 * 2 : 0;
#pragma unroll
    for (int step = 0; step < kPaired; step += 2) {
      const int at = kGroup * kGroupChunks + step;
#pragma unroll
      for (int i = 0; i < kMTiles; i++) mma_m16n8k16(acc[i], a[i][at], a[i][at + 1], b[step], b[step + 1]);
    }
#pragma unroll
    for (int step = kPaired; step < kCount; step++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) mma_m16n8k8(acc[i], a[i][kGroup * kGroupChunks + step], b[step]);
    }
  }
}

// acc[i] (16 x 8 kTiles) += A[i] B in the columns of a group; A is 16 x 8, B the 8 rows at rows_s.
template <int kGroup, typename Tile, int kMTiles, int kTiles>
__device__ __forceinline__ void add_product_nn(float (&acc)[kMTiles][kTiles][4], const uint32 (&a)[kMTiles][2],
                                               uint32 rows_s, const FragmentAddress<Tile>& address) {
  if constexpr (kGroup < chunk_groups(kTiles)) {
    constexpr int kCount = chunks_in_group(kTiles, kGroup);
    uint32 b[matrices_loaded(kCount)];
    ldmatrix_trans(b, rows_s + address.of_group(kGroup));
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) mma_m16n8k8(acc[i][kGroup * kGroupChunks + tile], a[i], b[tile]);
    }
  }
}

template <int kA, int kB>
__device__ __forceinline__ void clear(float (&acc)[kA][kB][4]) {
#pragma unroll
  for (int i = 0; i < kA; i++) {
#pragma unroll
    for (int j = 0; j < kB; j++) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.f;
  }
}
