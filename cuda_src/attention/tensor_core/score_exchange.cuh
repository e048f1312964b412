// Four warps that share 32 query rows, where neither Q nor the accumulator of wide heads fits the registers of one. A
// warp has a quarter of the columns: of Q and K, from which it computes a part of all 32 rows' scores, and of V and the
// output. And it has eight of the rows, whose scores it adds up from the four parts, and whose softmax is its own; the
// probabilities go back to all four. What passes between the warps lies in fragments' order: 8 or 16 neighbouring bytes
// a lane, without bank conflicts.
//
// Row 8 w + lane / 4 of the 32 is warp w's. Of the output it is in half w % 2 of m16 tile w / 2. In the scores each
// warp has its own rows first: half x % 2 of m16 tile x / 2 has the rows of warp w ^ x, so that no register depends on
// w.
#pragma once

#include "score_tile.cuh"

constexpr int kSharing = 4;  // warps
constexpr int kOwnRows = 8;
constexpr int kSharedRows = kSharing * kOwnRows;

__device__ __forceinline__ int sharing_group() { return warp_index() / kSharing; }
__device__ __forceinline__ int sharing_warp() { return warp_index() % kSharing; }

// The chunks of `columns` columns that each of the four warps has: whole groups of four chunks, of which some may lie
// beyond the columns, and are zero.
__host__ __device__ constexpr int chunks_of_warp(int columns) { return div_up(columns, kSharing * 32) * 4; }

// The 32 rows from first_row on as A fragments, this warp's rows first.
template <typename Tile, int kSteps>
__device__ __forceinline__ void load_own_rows_first(uint32 (&a)[2][kSteps][2], uint32 tile_s, int first_row,
                                                    int first_step) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int warp = sharing_warp() ^ (2 * i + lane_index() / 8 % 2);
    const int row = first_row + warp * kOwnRows + lane_index() % 8;
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32 r[4];
      ldmatrix(r, tile_s + Tile::offset(row, first_step + step + lane_index() / 16));
      a[i][step][0] = r[0], a[i][step][1] = r[1], a[i][step + 1][0] = r[2], a[i][step + 1][1] = r[3];
    }
  }
}

// Shared is the tile of a warp's products, Own that of its eight rows; both have the same keys.
template <typename Shared, typename Own, int kGroups>
struct ScoreExchange {
  static constexpr int kKeyTiles = Shared::kNTiles;
  static constexpr int kPairBytes = 8;  // of a lane: two scores, or the probabilities of two rows
  static constexpr int kFragmentBytes = kWarpSize * kPairBytes;
  static constexpr int kPartBytes = kKeyTiles * kFragmentBytes;
  static_assert(Shared::kMTiles * 16 == kSharedRows && Own::kNTiles == kKeyTiles, "32 rows");

  // [x - 1][w]: from warp w, of the rows of warp w ^ x.
  alignas(128) unsigned char parts[kGroups][kSharing - 1][kSharing][kPartBytes];
  unsigned char p[kGroups][kSharing / 2][kKeyTiles][kFragmentBytes];  // A fragments
  float factors[kGroups][kSharing / 2][kOwnRows][2];

  // This warp's part of the scores, to the other three.
  __device__ __forceinline__ void give(const typename Shared::Fragment& s) {
    const uint32 own_s = parts_of_lane() + sharing_warp() * kPartBytes;
#pragma unroll
    for (int x = 1; x < kSharing; x++) {
      const uint32 place_s = own_s + (x - 1) * kSharing * kPartBytes;
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++) {
        st_shared_v2(place_s + n * kFragmentBytes, s[n][x / 2][x % 2 * 2], s[n][x / 2][x % 2 * 2 + 1]);
      }
    }
  }

  // The scores of this warp's rows: its own part and the other three.
  __device__ __forceinline__ void take(typename Own::Fragment& own, const typename Shared::Fragment& s) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) own[n][0][0] = s[n][0][0], own[n][0][1] = s[n][0][1];
    const uint32 lane_s = parts_of_lane();
#pragma unroll
    for (int x = 1; x < kSharing; x++) {
      const uint32 place_s = lane_s + (sharing_warp() ^ x) * kPartBytes + (x - 1) * kSharing * kPartBytes;
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++) {
        float pair[2];
        ld_shared(pair, place_s + n * kFragmentBytes);
        own[n][0][0] += pair[0], own[n][0][1] += pair[1];
      }
    }
  }

  // The probabilities of this warp's rows, to all four.
  __device__ __forceinline__ void give_packed(const typename Own::Packed& own) {
    const uint32 lane_s = packed_address(sharing_warp() / 2) + sharing_warp() % 2 * sizeof(uint32);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) st_shared_u32(lane_s + n * kFragmentBytes, own[n][0][0]);
  }
  __device__ __forceinline__ void take_packed(typename Shared::Packed& all) const {
#pragma unroll
    for (int i = 0; i < kSharing / 2; i++) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++) {
        float pair[2];
        ld_shared(pair, packed_address(i) + n * kFragmentBytes);
        all[n][i][0] = __float_as_uint(pair[0]), all[n][i][1] = __float_as_uint(pair[1]);
      }
    }
  }

  // A factor of each row of this warp, to all four; of a fragment's rows one for each half.
  __device__ __forceinline__ void give_factor(float factor) {
    const int self = sharing_warp();
    if (lane_index() % 4 == 0) factors[sharing_group()][self / 2][lane_index() / 4][self % 2] = factor;
  }
  __device__ __forceinline__ void take_factors(float (&all)[kSharing / 2][2]) const {
#pragma unroll
    for (int i = 0; i < kSharing / 2; i++) {
      ld_shared(all[i], shared_address(factors[sharing_group()][i][lane_index() / 4]));
    }
  }

 private:
  // Of x = 1 and w = 0. It is a multiple of 8 bytes and no more: no bits of it may stand for x or w. (From sm_80 on
  // dynamic shared memory begins at 1,024.)
  __device__ __forceinline__ uint32 parts_of_lane() const {
    return shared_address(parts[sharing_group()]) + lane_index() * kPairBytes;
  }
  __device__ __forceinline__ uint32 packed_address(int i) const {
    return shared_address(p[sharing_group()][i]) + lane_index() * kPairBytes;
  }
};
