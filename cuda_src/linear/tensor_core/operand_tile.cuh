// A tile of an operand in shared memory: kOuter rows of A (or columns of B) by kInner items of the sum, in the order of
// global memory, swizzled. A and B are alike: a fragment has outer = lane / 4 and two neighbouring items of the sum,
// which ldmatrix loads from lines along the sum, and ldmatrix.trans from lines across it.
#pragma once

#include "../../common/swizzle.cuh"

enum class Lines {
  kAlong,   // a line is one row of A, or one column of B
  kAcross,  // a line is one item of the sum
};

constexpr int kFragmentOuter = 32;  // of one ldmatrix: four matrices of 8

template <Lines kLines_, int kOuter_, int kInner_>
struct OperandTile {
  static constexpr Lines kLines = kLines_;
  static constexpr int kOuter = kOuter_;
  static constexpr int kInner = kInner_;
  static constexpr bool kAlong = kLines == Lines::kAlong;
  using Swizzled = SwizzledTile<kAlong ? kOuter : kInner, (kAlong ? kInner : kOuter) / kChunkItems>;
  static constexpr int kBytes = Swizzled::kBytes;
  static_assert(kAlong ? kInner == 16 || kInner == 32 || kInner == 64 : kOuter % 64 == 0, "what the swizzle takes");
};

// The address that a lane passes to ldmatrix, for the kFragmentOuter outer items of a group and 8 items of the sum.
template <typename Tile>
struct FragmentCoordinates {
  // Two: across the sum, a group's parity takes part in the swizzle.
  uint32 at[Tile::kAlong ? 1 : 2];

  __device__ __forceinline__ FragmentCoordinates(uint32 tile_s, int first_outer) {
    const uint32 lane = lane_index();
    if constexpr (Tile::kAlong) {
      at[0] = tile_s + Tile::Swizzled::offset(first_outer + lane, 0);
    } else {
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        at[odd] = tile_s + Tile::Swizzled::offset(lane % 8, first_outer / kChunkItems + 4 * odd + lane / 8);
      }
    }
  }

  // To the other stage.
  __device__ __forceinline__ void move(uint32 bytes) {
    at[0] += bytes;
    if constexpr (!Tile::kAlong) at[1] += bytes;
  }

  // r[i] belongs to outer items 8 i to 8 i + 7 of the group; `step` counts 8 items of the sum.
  __device__ __forceinline__ void load(uint32 (&r)[4], int group, int step) const {
    constexpr int kRowBytes = Tile::Swizzled::kRowBytes;
    if constexpr (Tile::kAlong) {
      ldmatrix(r, (at[0] ^ (step * kChunkBytes)) + group * kFragmentOuter * kRowBytes);
    } else {
      ldmatrix_trans(r, at[group % 2] + group / 2 * (8 * kChunkBytes) + step * 8 * kRowBytes);
    }
  }
};
