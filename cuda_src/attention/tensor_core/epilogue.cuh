// The end of the forward: a warp's rows are normalised and stored, through shared memory, because a fragment holds 4
// bytes of a row.
#pragma once

#include "../../common/reduce.cuh"
#include "softmax.cuh"
#include "../params.cuh"
#include "../sinks.cuh"
#include "tile_loader.cuh"

// The rows of one warp; Traits as in forward.cuh.
template <typename Traits>
struct OutputRows {
  using OutTile = typename Traits::OutTile;
  using Scalar = typename Traits::Scalar;
  using Softmax = typename Traits::Softmax;

  const AttentionParams& params;
  const TileCoordinates& coords;
  int first_row;  // of the sequence

  // Normalise the rows and write them to the warp's part of the output tile; their lse to memory.
  __device__ __forceinline__ void finish(const Softmax& softmax, uint32 out_s, float sink, float* lse_g) const {
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = Traits::Tile::row_of(0, i, 2 * half);
        const float l = warp_reduce<Sum, 4>(softmax.l[i][half]) * Softmax::unshift();  // times 2^headroom_log2
        const float m = softmax.m[i][half] + Softmax::shift_log2();
        float total = l, scale = 1.f, top = m;
        if (Traits::kSinks) {
          top = fmaxf(m, sink);
          scale = ex2_approx(m - top);
          total = l * scale + ex2_approx(sink - top + Softmax::headroom_log2());
        }
        // No key: 0. A NaN in l stays one.
        float normaliser = total == 0.f ? 0.f : scale / total;
        if (Traits::kDropout) normaliser *= params.scores.keep_scale;
#pragma unroll
        for (int n = 0; n < Traits::kOutTiles; n++) {
          const Scalar low = from_float<Scalar>(softmax.acc[i][n][2 * half] * normaliser);
          const Scalar high = from_float<Scalar>(softmax.acc[i][n][2 * half + 1] * normaliser);
          const uint32 at = OutTile::offset(warp_index() * Traits::kWarpRows + row, n) + lane_index() % 4 * 4;
          st_shared_u32(out_s + at,
                        __builtin_bit_cast(uint16, low) | static_cast<uint32>(__builtin_bit_cast(uint16, high)) << 16);
        }
        const int query = first_row + row;
        if (lse_g != nullptr && lane_index() % 4 == 0 && query < coords.sq) {
          const float lse = total == 0.f ? -kInfinity : (top + lg2_approx(total) - Softmax::headroom_log2()) * kLn2;
          *query_row(lse_g, params.lse, coords, query) = lse;
        }
      }
    }
  }

  // The sums of a part of the keys, as they are: a fragment's 8 bytes of float32 fill a sector with its neighbours'.
  template <typename Part>
  __device__ __forceinline__ void store_sums(const Softmax& softmax, const Part& part) const {
    constexpr int kColumns = Traits::kHeadDimV;
    constexpr float kScale = 1.f / (1 << static_cast<int>(Softmax::headroom_log2()));
    const float acc_scale = Traits::kDropout ? kScale * params.scores.keep_scale : kScale;
#pragma unroll
    for (int i = 0; i < Traits::kMTiles; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float l = warp_reduce<Sum, 4>(softmax.l[i][half]) * Softmax::unshift() * kScale;
        const int query = first_row + Traits::Tile::row_of(0, i, 2 * half);
        if (query >= coords.sq) continue;
        const int64 row = part.row(coords, query);
#pragma unroll
        for (int n = 0; n < Traits::kOutTiles; n++) {
          const int column = n * 8 + lane_index() % 4 * 2;
          float* out_g = part.out_g + row * kColumns + column;
          const float x = softmax.acc[i][n][2 * half] * acc_scale, y = softmax.acc[i][n][2 * half + 1] * acc_scale;
          if (kColumns % 2 == 0) {
            if (column < kColumns) *reinterpret_cast<float2*>(out_g) = make_float2(x, y);
          } else {
            if (column < kColumns) out_g[0] = x;
            if (column + 1 < kColumns) out_g[1] = y;
          }
        }
        if (lane_index() % 4 == 0) part.sums_g[row] = make_float2(softmax.m[i][half] + Softmax::shift_log2(), l);
      }
    }
  }

  // The rows from the output tile to memory, in whole chunks where rows are aligned.
  __device__ __forceinline__ void store(const unsigned char* out, Scalar* out_g) const {
    constexpr int kChunks = OutTile::kChunks;
    for (int at = lane_index(); at < Traits::kWarpRows * kChunks; at += kWarpSize) {
      const int row = at / kChunks, chunk = at % kChunks;
      if (first_row + row >= coords.sq) break;
      const auto* chunk_s = reinterpret_cast<const Vec<Scalar, kChunkItems>*>(
          out + OutTile::offset(warp_index() * Traits::kWarpRows + row, chunk));
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
