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
template <int kGroup, typename Scalar = float16, typename Tile, int kMTiles, int kSteps>
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
      for (int i = 0; i < kMTiles; i++) mma_m16n8k16<Scalar>(acc[i], a[i][at], a[i][at + 1], b[step], b[step + 1]);
    }
#pragma unroll
    for (int step = kPaired; step < kCount; step++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) mma_m16n8k8<Scalar>(acc[i], a[i][kGroup * kGroupChunks + step], b[step]);
    }
  }
}

// acc[i] (16 x 8 kTiles) += A[i] B in the columns of a group; A is 16 x 8, B the 8 rows at rows_s.
template <int kGroup, typename Scalar = float16, typename Tile, int kMTiles, int kTiles>
__device__ __forceinline__ void add_product_nn(float (&acc)[kMTiles][kTiles][4], const uint32 (&a)[kMTiles][2],
                                               uint32 rows_s, const FragmentAddress<Tile>& address) {
  if constexpr (kGroup < chunk_groups(kTiles)) {
    constexpr int kCount = chunks_in_group(kTiles, kGroup);
    uint32 b[matrices_loaded(kCount)];
    ldmatrix_trans(b, rows_s + address.of_group(kGroup));
#pragma unroll
    for (int tile = 0; tile < kCount; tile++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) mma_m16n8k8<Scalar>(acc[i][kGroup * kGroupChunks + tile], a[i], b[tile]);
    }
  }
}

// A lane's address for ldmatrix, which reads 16 rows by two chunks of a tile as four matrices. For A operands, and for
// rows of V that are transposed, both matrices of a chunk come before those of the next (by_rows); for rows of K both
// matrices of 8 rows come before those of the next 8 (by_chunks).
template <typename Tile>
struct SixteenRows {
  static constexpr int kPairs = Tile::kChunks / 2;
  static constexpr int kBytes = 16 * Tile::kRowBytes;
  static constexpr bool kOdd = Tile::kChunks % 2;  // one chunk is left over

  uint32 offset;       // of the first pair of chunks
  uint32 tail_offset;  // of a chunk that is left over

  __device__ __forceinline__ static SixteenRows by_rows() {
    return {Tile::offset(lane_index() % 16, lane_index() / 16), Tile::offset(lane_index() % 16, Tile::kChunks - 1)};
  }
  __device__ __forceinline__ static SixteenRows by_chunks() {
    return {Tile::offset(lane_index() / 16 * 8 + lane_index() % 8, lane_index() / 8 % 2),
            Tile::offset(lane_index() % 16, Tile::kChunks - 1)};
  }

  // The swizzle flips bits of the chunk alone, which are the low ones of an address in chunks: a row's bytes and a
  // tile's address are multiples of what it may flip.
  __device__ __forceinline__ uint32 of_pair(uint32 rows_s, int pair) const {
    const uint32 chunk = 2 * pair;
    return ((rows_s + offset) ^ ((chunk & Tile::kXorMask) * kChunkBytes)) + (chunk & ~Tile::kXorMask) * kChunkBytes;
  }
  __device__ __forceinline__ uint32 of_tail(uint32 rows_s) const { return rows_s + tail_offset; }
};

// The A fragments of a pair of chunks of kMTiles * 16 rows, and of a chunk that is left over.
template <typename Tile, int kMTiles>
__device__ __forceinline__ void load_pair(uint32 (&a)[kMTiles][2][2], uint32 pair_s) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++) {
    uint32 r[4];
    ldmatrix(r, pair_s + i * SixteenRows<Tile>::kBytes);
    a[i][0][0] = r[0], a[i][0][1] = r[1], a[i][1][0] = r[2], a[i][1][1] = r[3];
  }
}
template <typename Tile, int kMTiles>
__device__ __forceinline__ void load_tail(uint32 (&a)[kMTiles][1][2], uint32 tail_s) {
#pragma unroll
  for (int i = 0; i < kMTiles; i++) ldmatrix(a[i][0], tail_s + i * SixteenRows<Tile>::kBytes);
}

// acc[n][i] (16 x 8) += A[i] B_n^T in the columns of the pair of chunks at `pair_s`, of which A has the fragments from
// `step` on; B_n is rows 8 n to 8 n + 7 of the tile. From sm_80 on, as what follows.
template <typename Scalar, typename Tile, int kNTiles, int kMTiles, int kSteps>
__device__ __forceinline__ void add_pair_nt(float (&acc)[kNTiles][kMTiles][4], const uint32 (&a)[kMTiles][kSteps][2],
                                            int step, uint32 pair_s) {
  static_assert(kNTiles % 2 == 0, "16 rows of B at a time");
#pragma unroll
  for (int n = 0; n < kNTiles; n += 2) {
    uint32 b[4];
    ldmatrix(b, pair_s + n / 2 * SixteenRows<Tile>::kBytes);
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      mma_m16n8k16<Scalar>(acc[n][i], a[i][step], a[i][step + 1], b[0], b[1]);
      mma_m16n8k16<Scalar>(acc[n + 1][i], a[i][step], a[i][step + 1], b[2], b[3]);
    }
  }
}

// The same for the chunk that is left over.
template <typename Scalar, typename Tile, int kNTiles, int kMTiles, int kSteps>
__device__ __forceinline__ void add_tail_nt(float (&acc)[kNTiles][kMTiles][4], const uint32 (&a)[kMTiles][kSteps][2],
                                            int step, uint32 tail_s) {
#pragma unroll
  for (int n = 0; n < kNTiles; n += 2) {
    uint32 b[2];
    ldmatrix(b, tail_s + n / 2 * SixteenRows<Tile>::kBytes);
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      mma_m16n8k8<Scalar>(acc[n][i], a[i][step], b[0]);
      mma_m16n8k8<Scalar>(acc[n + 1][i], a[i][step], b[1]);
    }
  }
}

// acc[i] (16 x 8 kTiles) += A[i] B; A is 16 x 16, in two halves of 8 columns, B the 16 rows at rows_s.
template <typename Scalar, typename Tile, int kMTiles, int kTiles>
__device__ __forceinline__ void add_sixteen_nn(float (&acc)[kMTiles][kTiles][4], const uint32 (&a)[kMTiles][2],
                                               const uint32 (&next_a)[kMTiles][2], uint32 rows_s,
                                               const SixteenRows<Tile>& lane) {
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; pair++) {
    uint32 b[4];
    ldmatrix_trans(b, lane.of_pair(rows_s, pair));
#pragma unroll
    for (int i = 0; i < kMTiles; i++) {
      mma_m16n8k16<Scalar>(acc[i][2 * pair], a[i], next_a[i], b[0], b[1]);
      mma_m16n8k16<Scalar>(acc[i][2 * pair + 1], a[i], next_a[i], b[2], b[3]);
    }
  }
  if constexpr (SixteenRows<Tile>::kOdd) {
    uint32 b[2];
    ldmatrix_trans(b, lane.of_tail(rows_s));
#pragma unroll
    for (int i = 0; i < kMTiles; i++) mma_m16n8k16<Scalar>(acc[i][kTiles - 1], a[i], next_a[i], b[0], b[1]);
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

// What follows is for head dims of more than 256 columns: kSlices warps share the columns of the rows that a CTA keeps.
// A product of scores is a sum over columns, so each warp has a part of it, and shared memory brings the parts
// together.

// k8 steps of a warp: whole groups of chunks.
__host__ __device__ constexpr int slice_steps(int columns, int slices) {
  return div_up(columns, slices * kGroupChunks * kChunkItems) * kGroupChunks;
}

// The parts of a tile of scores, as accumulators: one quad of each lane after the other, so that a warp's accesses are
// contiguous.
template <int kSlices, int kNTiles, int kMTiles>
struct PartialScores {
  float4 quads[kSlices][kNTiles][kMTiles][kWarpSize];

  // A warp's part of the kPartTiles n8 tiles from `n8_tile` on.
  template <int kPartTiles>
  __device__ __forceinline__ void put(int slice, int n8_tile, const float (&part)[kPartTiles][kMTiles][4]) {
#pragma unroll
    for (int n = 0; n < kPartTiles; n++) {
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        const float (&x)[4] = part[n][i];
        quads[slice][n8_tile + n][i][lane_index()] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  // The sums of all parts, in a fixed order, of the kSumTiles n8 tiles from `n8_tile` on of one m16 tile.
  template <int kSumTiles>
  __device__ __forceinline__ void sum(float (&sums)[kSumTiles][1][4], int n8_tile, int m16_tile) const {
#pragma unroll
    for (int n = 0; n < kSumTiles; n++) {
      float (&x)[4] = sums[n][0];
      x[0] = x[1] = x[2] = x[3] = 0.f;
#pragma unroll
      for (int slice = 0; slice < kSlices; slice++) {
        const float4 part = quads[slice][n8_tile + n][m16_tile][lane_index()];
        x[0] += part.x;
        x[1] += part.y;
        x[2] += part.z;
        x[3] += part.w;
      }
    }
  }
};

// A warp's columns of kMTiles * 16 rows, as A fragments, and of the kNTiles * 8 rows of another tile in shared memory,
// of which it takes 16 at a time.
template <typename RowsTile, typename OtherTile, int kSlices, int kMTiles, int kNTiles>
struct ColumnSlice {
  static constexpr int kSteps = RowsTile::kChunks / kSlices;
  static constexpr int kTogether = 2;  // n8 tiles
  using Parts = PartialScores<kSlices, kNTiles, kMTiles>;
  using WeightsTile = SwizzledTile<kMTiles * 16, kNTiles>;
  using Sums = float[kMTiles][kSteps][4];
  static_assert(kSteps % kGroupChunks == 0 && kNTiles % kTogether == 0, "whole groups");

  int slice, first_chunk;
  FragmentAddress<OtherTile> fragment;
  uint32 rows[kMTiles][kSteps][2];

  __device__ __forceinline__ explicit ColumnSlice(int slice_)
      : slice(slice_), first_chunk(slice * kSteps), fragment(first_chunk) {}

  // The warp's part of rows other^T.
  template <typename Scalar>
  __device__ __forceinline__ void put_scores(Parts& parts, uint32 other_s) const {
#pragma unroll 1
    for (int n = 0; n < kNTiles; n += kTogether) {
      Scores scores;
      clear(scores);
      add_scores<Scalar>(scores, other_s + n * 8 * OtherTile::kRowBytes);
      parts.put(slice, n, scores);
    }
  }

  // sums += weights other in the warp's columns; the weights are a tile in shared memory. `after_first` is called after
  // the products of the first MMA_K rows.
  template <typename Scalar, typename AfterFirst>
  __device__ __forceinline__ void add_weighted(Sums& sums, uint32 weights_s, uint32 other_s,
                                               AfterFirst after_first) const {
#pragma unroll 1
    for (int n = 0; n < kNTiles; n += kTogether) {
      const uint32 rows_s = other_s + n * 8 * OtherTile::kRowBytes;
      uint32 a[kTogether][kMTiles][2];
#pragma unroll
      for (int i = 0; i < kMTiles; i++) {
        uint32 r[4];
        ldmatrix<4>(r, weights_s + WeightsTile::offset(16 * i + lane_index() % 16, n + lane_index() / 16));
        a[0][i][0] = r[0], a[0][i][1] = r[1], a[1][i][0] = r[2], a[1][i][1] = r[3];
      }
      if constexpr (MMA_K == 16) {
        add_sixteen<Scalar>(sums, a[0], a[1], rows_s);
        if (n == 0) after_first();
      } else {
        add_eight<Scalar>(sums, a[0], rows_s);
        if (n == 0) after_first();
        add_eight<Scalar>(sums, a[1], rows_s + 8 * OtherTile::kRowBytes);
      }
    }
  }

 private:
  using Scores = float[kTogether][kMTiles][4];

  // scores += rows other^T over the warp's columns from this group on, group by group: all sums in turn, so that a
  // product does not wait for the one before it.
  template <typename Scalar, int kGroup = 0>
  __device__ __forceinline__ void add_scores(Scores& scores, uint32 other_s) const {
    constexpr int kStep = MMA_K / 8;
    uint32 b[kTogether][kGroupChunks];
#pragma unroll
    for (int n = 0; n < kTogether; n++) {
      ldmatrix(b[n], other_s + n * 8 * OtherTile::kRowBytes + fragment.of_group(kGroup));
    }
#pragma unroll
    for (int step = 0; step < kGroupChunks; step += kStep) {
      const int at = kGroup * kGroupChunks + step;
#pragma unroll
      for (int n = 0; n < kTogether; n++) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
          if constexpr (kStep == 2) {
            mma_m16n8k16<Scalar>(scores[n][i], rows[i][at], rows[i][at + 1], b[n][step], b[n][step + 1]);
          } else {
            mma_m16n8k8<Scalar>(scores[n][i], rows[i][at], b[n][step]);
          }
        }
      }
    }
    if constexpr (kGroup + 1 < kSteps / kGroupChunks) add_scores<Scalar, kGroup + 1>(scores, other_s);
  }

  template <typename Scalar, int kGroup = 0>
  __device__ __forceinline__ void add_eight(Sums& sums, const uint32 (&weights)[kMTiles][2], uint32 rows_s) const {
    add_product_nn<kGroup, Scalar>(sums, weights, rows_s, fragment);
    if constexpr (kGroup + 1 < chunk_groups(kSteps)) add_eight<Scalar, kGroup + 1>(sums, weights, rows_s);
  }
  template <typename Scalar>
  __device__ __forceinline__ void add_sixteen(Sums& sums, const uint32 (&weights)[kMTiles][2],
                                              const uint32 (&next_weights)[kMTiles][2], uint32 rows_s) const {
#pragma unroll
    for (int group = 0; group < kSteps / kGroupChunks; group++) {
      uint32 b[kGroupChunks], next_b[kGroupChunks];
      ldmatrix_trans(b, rows_s + fragment.of_group(group));
      ldmatrix_trans(next_b, rows_s + 8 * OtherTile::kRowBytes + fragment.of_group(group));
#pragma unroll
      for (int chunk = 0; chunk < kGroupChunks; chunk++) {
#pragma unroll
        for (int i = 0; i < kMTiles; i++) {
          mma_m16n8k16<Scalar>(sums[i][group * kGroupChunks + chunk], weights[i], next_weights[i], b[chunk],
                               next_b[chunk]);
        }
      }
    }
  }
};
