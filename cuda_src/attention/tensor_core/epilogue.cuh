// The end of the forward: a warp's rows are normalised and stored, through shared memory, because a fragment holds 4
// bytes of a row.
#pragma once

#include "../../common/reduce.cuh"
#include "softmax.cuh"
#include "../params.cuh"
#include "../sinks.cuh"
#include "tile_loader.cuh"

// The end of a row's softmax, from the sum of its P and its maximum, both times what they are kept by.
template <typename Softmax>
struct RowEnd {
  float total, top;  // sum of P, times 2^headroom_log2; what P is relative to, in log2
  float normaliser;

  // `l`: the row's whole sum, `m` as the softmax has it.
  __device__ __forceinline__ RowEnd(float sum, float maximum, bool sinks, float sink) {
    const float l = sum * Softmax::unshift();  // times 2^headroom_log2
    const float m = maximum + Softmax::shift_log2();
    float scale = 1.f;
    total = l, top = m;
    if (sinks) {
      top = fmaxf(m, sink);
      scale = ex2_approx(m - top);
      total = l * scale + ex2_approx(sink - top + Softmax::headroom_log2());
    }
    // No key: 0. A NaN in l stays one.
    normaliser = total == 0.f ? 0.f : scale / total;
  }

  __device__ __forceinline__ float lse() const {
    return total == 0.f ? -kInfinity : (top + lg2_approx(total) - Softmax::headroom_log2()) * kLn2;
  }
};

// The rows of one warp; Traits as in forward.cuh.
template <typename Traits>
struct OutputRows {
  using OutTile = typename Traits::OutTile;
  using Scalar = typename Traits::Scalar;
  using Softmax = typename Traits::Softmax;

  const AttentionParams& params;
  const TileCoordinates& coords;
  int first_row;                 // of the sequence
  int row_group = warp_index();  // the warp's rows in the output tile, in units of them
  int first_chunk = 0;           // of the warp's columns

  // Whether the tile has chunks beyond the columns.
  static constexpr bool kPadded = OutTile::kChunks * kChunkItems - Traits::kHeadDimV >= kChunkItems;

  // Normalise the rows and write them to the warp's part of the output tile; their lse to memory.
  __device__ __forceinline__ void finish(const Softmax& softmax, uint32 out_s, float sink, float* lse_g) const {
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = Traits::Tile::row_of(0, i, 2 * half);
        const RowEnd<Softmax> end(warp_reduce<Sum, 4>(softmax.l[i][half]), softmax.m[i][half], Traits::kSinks, sink);
        float normaliser = end.normaliser;
        if (Traits::kDropout) normaliser *= params.scores.keep_scale;
        put(out_s, softmax.acc[i], row, half, normaliser);
        const int query = first_row + row;
        if (lse_g != nullptr && lane_index() % 4 == 0 && query < coords.sq) {
          *query_row(lse_g, params.lse, coords, query) = end.lse();
        }
      }
    }
  }

  // One of the warp's rows, times `normaliser`, to the output tile; `half` of the fragments has it.
  __device__ __forceinline__ void put(uint32 out_s, const float (&acc)[Traits::kOutTiles][4], int row, int half,
                                      float normaliser) const {
#pragma unroll
    for (int n = 0; n < Traits::kOutTiles; n++) {
      const Scalar low = from_float<Scalar>(acc[n][2 * half] * normaliser);
      const Scalar high = from_float<Scalar>(acc[n][2 * half + 1] * normaliser);
      const uint32 at = OutTile::offset(row_group * Traits::kWarpRows + row, first_chunk + n) + lane_index() % 4 * 4;
      st_shared_u32(out_s + at, __builtin_bit_cast(uint16, low) | static_cast<uint32>(__builtin_bit_cast(uint16, high))
                                                                      << 16);
    }
  }

  // The sums of a part of the keys, as they are: a fragment's 8 bytes of float32 fill a sector with its neighbours'.
  template <typename Part>
  __device__ __forceinline__ void store_sums(const Softmax& softmax, const Part& part) const {
    const float acc_scale = Traits::kDropout ? kSumScale * params.scores.keep_scale : kSumScale;
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float l = warp_reduce<Sum, 4>(softmax.l[i][half]) * Softmax::unshift() * kSumScale;
        const int query = first_row + Traits::Tile::row_of(0, i, 2 * half);
        if (query >= coords.sq) continue;
        const int64 row = part.row(coords, query);
        store_sum(part.out_g + row * Traits::kHeadDimV, softmax.acc[i], half, acc_scale);
        if (lane_index() % 4 == 0) part.sums_g[row] = make_float2(softmax.m[i][half] + Softmax::shift_log2(), l);
      }
    }
  }

  // The factor of sums in scratch memory: P is kept times 2^headroom_log2.
  static constexpr float kSumScale = 1.f / (1 << static_cast<int>(Softmax::headroom_log2()));

  // One row of sums, times `scale`; `half` of the fragments has it.
  __device__ __forceinline__ void store_sum(float* row_g, const float (&acc)[Traits::kOutTiles][4], int half,
                                            float scale) const {
    constexpr int kColumns = Traits::kHeadDimV;
#pragma unroll
    for (int n = 0; n < Traits::kOutTiles; n++) {
      const int column = (first_chunk + n) * 8 + lane_index() % 4 * 2;
      float* out_g = row_g + column;
      const float x = acc[n][2 * half] * scale, y = acc[n][2 * half + 1] * scale;
      if (kColumns % 2 == 0) {
        if (column < kColumns) *reinterpret_cast<float2*>(out_g) = make_float2(x, y);
      } else {
        if (column < kColumns) out_g[0] = x;
        if (column + 1 < kColumns) out_g[1] = y;
      }
    }
  }

  // The warp's columns of its rows from the output tile to memory, in whole chunks where rows are aligned.
  __device__ __forceinline__ void store(const unsigned char* out, Scalar* out_g) const {
    constexpr int kChunks = Traits::kOutTiles;
    for (int at = lane_index(); at < Traits::kWarpRows * kChunks; at += kWarpSize) {
      const int row = at / kChunks, chunk = first_chunk + at % kChunks;
      if (first_row + row >= coords.sq) break;
      if (kPadded && chunk * kChunkItems >= Traits::kHeadDimV) continue;
      const auto* chunk_s = reinterpret_cast<const Vec<Scalar, kChunkItems>*>(
          out + OutTile::offset(row_group * Traits::kWarpRows + row, chunk));
      Scalar* row_g = query_row(out_g, params.out, coords, first_row + row);
      if (Traits::kVec == kChunkItems) {
        *reinterpret_cast<Vec<Scalar, kChunkItems>*>(row_g + chunk * kChunkItems) = *chunk_s;
      } else {
#pragma unroll
        for (int e = 0; e < kChunkItems; e++) {
          if (chunk * kChunkItems + e < Traits::kHeadDimV) row_g[chunk * kChunkItems + e] = chunk_s->item[e];
        }
      }
    }
  }
};
