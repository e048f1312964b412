// Loads of the skinny kernel for a quantised weight: packed columns of w with their scales, and rows of x, to
// registers.
#pragma once

#include "skinny_config.cuh"

// The place in a span where the k of this lane's chunks begin, after words were exchanged.
__device__ __forceinline__ int lane_item() {
  const int t = lane_in_group();
  if (Traits::kBlocks == 4) return 8 * t;
  if (Traits::kBlocks == 2) return Traits::kLaneItems / 2 * (t % 2 * 2 + t / 2);
  return Traits::kLaneItems * t;
}
__device__ __forceinline__ constexpr int chunk_item(int chunk) {
  constexpr int kPerBlock = div_up(Traits::kChunks, Traits::kBlocks);
  return chunk / kPerBlock * (Traits::kBlocks > 1 ? Traits::kBlockItems : 0) +
         (Traits::kBlocks > 1 ? chunk % kPerBlock : chunk) * 8;
}

// Words of the four lanes of a span, so that word i of all belongs to block i kBlocks / 4.
__device__ __forceinline__ void trade(uint4& v) {
  const int t = lane_in_group();
  if constexpr (Traits::kBlocks == 4) {  // a transpose, by odd and even lanes, then by halves
    const bool odd = t & 1, upper = t & 2;
    const uint32 a = __shfl_xor_sync(kFullWarp, odd ? v.x : v.y, 1), b = __shfl_xor_sync(kFullWarp, odd ? v.z : v.w, 1);
    const uint4 w = odd ? make_uint4(a, v.y, b, v.w) : make_uint4(v.x, a, v.z, b);
    const uint32 c = __shfl_xor_sync(kFullWarp, upper ? w.x : w.z, 2),
                 d = __shfl_xor_sync(kFullWarp, upper ? w.y : w.w, 2);
    v = upper ? make_uint4(c, d, w.z, w.w) : make_uint4(w.x, w.y, c, d);
  } else if constexpr (Traits::kBlocks == 2) {  // halves of a lane with the lane two further on
    const bool upper = t & 2;
    const uint32 a = __shfl_xor_sync(kFullWarp, upper ? v.x : v.z, 2),
                 b = __shfl_xor_sync(kFullWarp, upper ? v.y : v.w, 2);
    v = upper ? make_uint4(a, b, v.z, v.w) : make_uint4(v.x, v.y, a, b);
  }
}

// The packed columns of a warp: 16 to a tile over the PARTS of a run of K.
struct PackedColumns {
  const uint4* codes_g;
  const uint32* scales_g;
  const uint32* super_scales_g;
  uint32 line[Traits::kLines];  // where a column begins, in vectors of codes
  uint4 codes[Traits::kSteps][Traits::kLines];
  Traits::Scales scales[Traits::kSteps][Traits::kLines];

  __device__ __forceinline__ PackedColumns(const uint4* codes_g, const uint32* scales_g, const uint32* super_scales_g)
      : codes_g(codes_g), scales_g(scales_g), super_scales_g(super_scales_g) {}

  // Go to the tile whose first result is `first`. Columns beyond the last read the last: their sums are not stored.
  __device__ __forceinline__ void move_to(const ThinParams& params, int first) {
#pragma unroll
    for (int i = 0; i < Traits::kLines; i++) {
      const int column = (8 * i + lane_group()) / Traits::kParts;
      const int n = min(Tile::result(first, column), params.outer - 1) + Tile::half(column, params.outer);
      line[i] = static_cast<uint32>(n) * (params.inner / Traits::kLaneItems);
    }
  }

  __device__ __forceinline__ void load(int k, int end) {
#pragma unroll
    for (int step = 0; step < Traits::kSteps; step++) {
      const int span = k + step * Traits::kStepItems + lane_group() % Traits::kParts * Traits::kSpanItems;
      const int own = span + lane_in_group() * Traits::kLaneItems;
#pragma unroll
      for (int i = 0; i < Traits::kLines; i++) {
        codes[step][i] = ld_once_v4(codes_g + (line[i] + own / Traits::kLaneItems), own < end);
      }
      if constexpr (!Traits::kColumnScale) {
        const int blocks = (end - span + Traits::kBlockItems - 1) / Traits::kBlockItems;
#pragma unroll
        for (int i = 0; i < Traits::kLines; i++) {
          const uint32 block = (line[i] + span / Traits::kLaneItems) / Traits::kBlockVectors;
          scales[step][i].load(scales_g, super_scales_g, block, blocks);
        }
      }
    }
  }
};

// Rows of x, a tile at a time, in chunks; X_SLOTS chunks are held at once. Rows beyond the last are zeros.
struct InputRows {
  const float16* row_g;
  int64 tile_stride;
  int rows;  // from this lane's on
  uint4 chunks[Traits::kXSlots][Traits::kXTiles];

  __device__ __forceinline__ InputRows(const float16* x_g, const ThinParams& params) {
    const int row = lane_group() % Traits::kRows, part = lane_group() / Traits::kRows;
    row_g = x_g + row * params.x_stride + part * Traits::kSpanItems + lane_item();
    tile_stride = 8 * params.x_stride;
    rows = params.rows - row;
  }

  // Chunk `index` of a burst.
  __device__ __forceinline__ void load(int index, int k, int end) {
    const int skip = index / Traits::kChunks * Traits::kStepItems + chunk_item(index % Traits::kChunks);
    const int part = lane_group() / Traits::kRows * Traits::kSpanItems;
    const int count = end - k - skip - part - lane_item();
    const float16* source = row_g + k + skip;
#pragma unroll
    for (int j = 0; j < Traits::kXTiles; j++) {
      uint32 pairs[4];
      load_pairs<8, VEC, false>(pairs, source, 8 * j < rows ? count : 0);
      chunks[index % Traits::kXSlots][j] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      source += tile_stride;
    }
  }
};

// The bursts that a warp multiplies, tile after tile.
struct Bursts {
  PackedColumns w;
  InputRows x;
  int k, end;

  __device__ __forceinline__ Bursts(const float16* x_g, const uint4* codes_g, const uint32* scales_g,
                                    const uint32* super_scales_g, const ThinParams& params)
      : w(codes_g, scales_g, super_scales_g), x(x_g, params) {}

  // To the first of a tile.
  __device__ __forceinline__ void move_to(const ThinParams& params, const Traits::Part& part, bool exists) {
    w.move_to(params, part.first);
    k = (part.from + warp_in_group()) * Traits::kBurstItems;
    end = exists ? part.end(params) : 0;
  }

  // All of its codes and scales, and the first of x.
  __device__ __forceinline__ void load() {
    w.load(k, end);
#pragma unroll
    for (int index = 0; index < Traits::kXSlots; index++) x.load(index, k, end);
  }
};
