// dQ += dS K for one tile of queries, by a CTA whose warps have put dS^T into shared memory: each warp takes a share of
// the tile's columns (and rows, where kRowWarps > 1), and adds it to the float32 accumulator in global memory.
//
// The accumulator lies in fragment order (backward_params.cuh): each of a warp's atomic additions covers 128 contiguous
// bytes, at addresses that differ by constants.
#pragma once

#include "products.cuh"

// The address of a lane's items of dS^T: those of the key lane / 4 after `first_row`, in chunk 0. A chunk is then one
// XOR away.
template <typename DsTile>
__device__ __forceinline__ uint32 ds_lane_address(uint32 ds_s, int first_row) {
  static_assert((DsTile::kChunks & (DsTile::kChunks - 1)) == 0 && DsTile::kChunks <= 8, "all chunk bits are swizzled");
  return kept_in_register(ds_s + DsTile::offset(first_row + lane_index() / 4, 0) + lane_index() % 4 * 4);
}

// A warp's dS^T of kMTiles * 16 keys and the 8 queries of a chunk.
template <typename DsTile, int kMTiles>
__device__ __forceinline__ void store_ds(uint32 lane_s, int chunk, const uint32 (&ds)[kMTiles][2]) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      st_shared_u32((lane_s ^ chunk * kChunkBytes) + (16 * i + 8 * half) * DsTile::kRowBytes, ds[i][half]);
    }
  }
}

// kParts: how many parts of its columns a warp adds one after the other, for fewer registers.
template <typename DsTile, typename KTile, int kTileQ, int kWarps, int kRowWarps, int kParts = 1>
struct DqSlice {
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kRowTiles = kTileQ / 16 / kRowWarps;                     // m16 tiles of a warp
  static constexpr int kChunks = div_up(KTile::kChunks, kColumnWarps* kParts);  // n8 tiles of a part, at most
  static constexpr bool kEven = KTile::kChunks % (kColumnWarps * kParts) == 0;
  static_assert(kWarps % kRowWarps == 0 && kTileQ % (16 * kRowWarps) == 0, "whole m16 tiles for each warp");

  static constexpr int kPartCount = kParts;

  int first_row_tile, first_chunk, chunks;

  __device__ __forceinline__ explicit DqSlice(int part = 0) {
    const int column = warp_index() / kRowWarps * kParts + part;
    first_row_tile = warp_index() % kRowWarps * kRowTiles;
    first_chunk = column * KTile::kChunks / (kColumnWarps * kParts);
    chunks = (column + 1) * KTile::kChunks / (kColumnWarps * kParts) - first_chunk;
  }

  __device__ __forceinline__ bool has(int chunk) const { return kEven || chunk + 1 < kChunks || chunk < chunks; }

  // `tile_g` is the accumulator of the query tile.
  __device__ __forceinline__ void add(float* tile_g, uint32 ds_s, uint32 k_s) const {
    const int row = lane_index() % 8, matrix = lane_index() / 8;
    uint32 ds_at[kRowTiles], k_at[div_up(kChunks, 2)];
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {  // 16 keys by 16 queries: matrices by query within 8 keys
      ds_at[i] = ds_s + DsTile::offset(row + matrix / 2 * 8, (first_row_tile + i) * 2 + matrix % 2);
    }
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {  // 16 keys by two chunks, or by the odd last one
      const bool pair = c + 1 < kChunks;
      const int next_chunk = MMA_K == 16 ? matrix / 2 : matrix % 2, next_rows = MMA_K == 16 ? matrix % 2 : matrix / 2;
      const int chunk = min(first_chunk + c + (pair ? next_chunk : 0), KTile::kChunks - 1);
      k_at[c / 2] = k_s + KTile::offset(row + (pair ? next_rows : matrix % 2) * 8, chunk);
    }

    float acc[kRowTiles][kChunks][4];
    clear(acc);
#pragma unroll
    for (int key = 0; key < KTile::kRows; key += 16) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; i++) ldmatrix_trans<4>(a[i], ds_at[i] + key * DsTile::kRowBytes);
#pragma unroll
      for (int c = 0; c < kChunks; c += 2) {
        if (c + 1 < kChunks) {
          uint32 b[4];
          ldmatrix_trans<4>(b, k_at[c / 2] + key * KTile::kRowBytes);
          // In one instruction of 16 keys both its registers have to be neighbours.
          multiply(acc, a, c, b[0], b[MMA_K == 16 ? 1 : 2]);
          if (has(c + 1)) multiply(acc, a, c + 1, b[MMA_K == 16 ? 2 : 1], b[3]);
        } else if (has(c)) {
          uint32 b[2];
          ldmatrix_trans<2>(b, k_at[c / 2] + key * KTile::kRowBytes);
          multiply(acc, a, c, b[0], b[1]);
        }
      }
    }

    float* lane_g = tile_g + (first_row_tile * KTile::kChunks + first_chunk) * 128 + lane_index();
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) {
#pragma unroll
      for (int c = 0; c < kChunks; c++) {
        if (!has(c)) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          red_global_add(lane_g + (i * KTile::kChunks + c) * 128 + e * kWarpSize, acc[i][c][e]);
        }
      }
    }
  }

  // One n8 tile, two k8 steps: 8 keys each.
  __device__ __forceinline__ static void multiply(float (&acc)[kRowTiles][kChunks][4], const uint32 (&a)[kRowTiles][4],
                                                  int chunk, uint32 b_low, uint32 b_high) {
    if constexpr (MMA_K == 16) {
#pragma unroll
      for (int i = 0; i < kRowTiles; i++) {
        mma_m16n8k16<DTYPE>(acc[i][chunk], {a[i][0], a[i][1]}, {a[i][2], a[i][3]}, b_low, b_high);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) mma_m16n8k8<DTYPE>(acc[i][chunk], {a[i][0], a[i][1]}, b_low);
#pragma unroll
    for (int i = 0; i < kRowTiles; i++) mma_m16n8k8<DTYPE>(acc[i][chunk], {a[i][2], a[i][3]}, b_high);
  }
};
