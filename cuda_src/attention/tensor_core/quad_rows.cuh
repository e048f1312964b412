// Operands of which a lane reads a chunk (8 columns, 16 bytes) at once where ldmatrix hands it four bytes of four
// chunks.
//
// A product is a sum over columns in any order, if both operands have the same. So of 32 columns lane 4 g + t takes
// those of chunk t, and k8 step s has its items 2 s and 2 s + 1. Rows along m16 then come from global memory to
// registers without a trip through shared memory, whose bandwidth would bind where both operands change from product to
// product. Columns are padded with zeros to whole groups of four chunks.
#pragma once

#if !defined(MMA_K)
#error "MMA_K comes from a launch-configuration table"
#endif
#include "gradient_scale.cuh"

constexpr int kQuadGroup = 4;  // chunks that the lanes of a row read together
__host__ __device__ constexpr int quad_chunks(int columns) { return div_up(columns, 32) * kQuadGroup; }

// As SwizzledTile, for reads of four chunks of two rows at a time.
template <int kRows_, int kColumns>
struct QuadTile {
  static constexpr int kRows = kRows_;
  static constexpr int kChunks = quad_chunks(kColumns);
  static constexpr int kRowBytes = kChunks * kChunkBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kXorBits = kChunks % 8 == 0 ? 3 : 2;  // TileLoader's lanes: so many chunks of a row

  // Rows of an odd number of groups lie a group apart by themselves.
  __device__ __forceinline__ static constexpr uint32 flip(uint32 row) {
    return kChunks % 8 == 0 ? row % 2 * kQuadGroup : 0;
  }
  __device__ __forceinline__ static uint32 offset(uint32 row, uint32 chunk) {
    return row * kRowBytes + (chunk ^ flip(row)) * kChunkBytes;
  }
};

// The address from which a lane reads of 8 rows: its chunk of each group.
template <typename Tile>
struct QuadAddress {
  uint32 even, odd;

  __device__ __forceinline__ QuadAddress() {
    const uint32 row = lane_index() / 4, chunk = lane_index() % 4;
    even = Tile::offset(row, chunk);
    odd = Tile::offset(row, Tile::kChunks > kQuadGroup ? chunk + kQuadGroup : chunk);
  }
  __device__ __forceinline__ uint32 of_group(int group) const {
    if (Tile::kChunks % 8 != 0) return even + group * (kQuadGroup * kChunkBytes);
    return (group % 2 ? odd : even) + group / 2 * (2 * kQuadGroup * kChunkBytes);
  }
};

// kMTiles * 16 rows as A fragments: of each k8 step what a lane has of rows lane / 4 and of those 8 further, in one
// value. As two, which come from two loads, ptxas copied both before every product: 512 of 2,190 instructions of a loop
// (NVRTC 12.9.86, 2026-11-24).
template <int kCols, int kMTiles>
struct QuadRows {
  static constexpr int kSteps = quad_chunks(kCols);

  uint64 pairs[kMTiles][kSteps];

  using Quads = uint4[kMTiles][2][kSteps / kQuadGroup];

  // Take what `load` read.
  __device__ __forceinline__ void take(const Quads& quads) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int group = 0; group < kSteps / kQuadGroup; group++) {
        const uint4 &low = quads[i][0][group], &high = quads[i][1][group];
        uint64* step = &pairs[i][group * kQuadGroup];
        step[0] = one_value(low.x, high.x);
        step[1] = one_value(low.y, high.y);
        step[2] = one_value(low.z, high.z);
        step[3] = one_value(low.w, high.w);
      }
    }
  }
  // Take it times a power of two.
  __device__ __forceinline__ void take(Quads& quads, float factor) {
    const uint32 both = pack_halves(factor, factor);
#pragma unroll
    for (auto& rows : quads) {
#pragma unroll
      for (auto& half : rows) {
#pragma unroll
        for (uint4& quad : half) quad = times(quad, both);
      }
    }
    take(quads);
  }

  // From global memory; rows from `rows` on become zero and are not read.
  template <int kVec>
  __device__ __forceinline__ static void load(Quads& quads, const DTYPE* rows_g, int64 row_stride, int rows) {
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = 16 * i + 8 * half + lane_index() / 4;
        const DTYPE* row_g = rows_g + row * row_stride;
#pragma unroll
        for (int group = 0; group < kSteps / kQuadGroup; group++) {
          const int chunk = group * kQuadGroup + lane_index() % 4;
          const bool in_all_lanes = (group + 1) * kQuadGroup * kChunkItems <= kCols;
          uint4& quad = quads[i][half][group];
          quad = make_uint4(0, 0, 0, 0);
          if (row < rows && (in_all_lanes || chunk * kChunkItems < kCols)) {
            quad = load_chunk<kCols, kVec>(row_g + chunk * kChunkItems, chunk);
          }
        }
      }
    }
  }

 private:
  // Opaque, so that it stays one.
  __device__ __forceinline__ static uint64 one_value(uint32 low, uint32 high) {
    uint64 pair;
    asm volatile("mov.b64 %0, {%1, %2};" : "=l"(pair) : "r"(low), "r"(high));
    return pair;
  }
};

// acc[i] (16 x 8) += A[i] B^T over the columns of a group, if there is one; B are the 8 rows at rows_s.
template <int kGroup, typename Tile, int kCols, int kMTiles>
__device__ __forceinline__ void add_quad_product(float (&acc)[kMTiles][4], const QuadRows<kCols, kMTiles>& a,
                                                 uint32 rows_s, const QuadAddress<Tile>& address) {
  if constexpr (kGroup * kQuadGroup < quad_chunks(kCols)) {
    const uint4 quad = ld_shared_v4(rows_s + address.of_group(kGroup));
    const uint32 b[] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int step = 0; step < kQuadGroup; step += MMA_K / 8) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        const uint64* pairs = &a.pairs[i][kGroup * kQuadGroup + step];
        const uint32 first[2] = {static_cast<uint32>(pairs[0]), static_cast<uint32>(pairs[0] >> 32)};
        if constexpr (MMA_K == 16) {
          const uint32 second[2] = {static_cast<uint32>(pairs[1]), static_cast<uint32>(pairs[1] >> 32)};
          mma_m16n8k16<DTYPE>(acc[i], first, second, b[step], b[step + 1]);
        } else {
          mma_m16n8k8<DTYPE>(acc[i], first, b[step]);
        }
      }
    }
  }
}
