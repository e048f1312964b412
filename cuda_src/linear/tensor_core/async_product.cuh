// The main loop of a CTA's tile of a product from sm_80 on: operands pass no register on their way to shared memory.
//
// Stages form a ring of STAGES. While one is multiplied, cp.async fills the one that was multiplied before, for the
// k-tile STAGES - 1 ahead, in pieces between the products. A step is 16 items of the sum, and a pair is two tiles of 8
// columns of B in a step: one ldmatrix. B's pairs are read two pairs ahead into a ring of registers. A's fragments are
// read one step ahead: into the registers whose products have just been issued (A_SETS is 1), or into a second set.
// Interface as TileProduct (tile_product.cuh).
//
// The k-tile that is multiplied last has no successors: what is copied meanwhile is zeros, so that every thread waits
// for as many groups of copies as in the loop.
#pragma once

#if !defined(STAGES) || !defined(A_SETS)
#error "STAGES and A_SETS come from a launch-configuration table"
#endif
#include "operand_loader.cuh"

enum class Order {
  kOuterFirst,  // fragments of A: both matrices of items 0-7 of the sum, then both of items 8-15
  kInnerFirst,  // fragments of B: items 0-7 and 8-15 of outer items 0-7, then of outer items 8-15
};

// The address that a lane passes to ldmatrix for 16 outer items and 16 items of the sum, whose four matrices arrive in
// the order in which mma.m16n8k16 takes them: operands in other registers would be moved first.
template <typename Tile, Order kOrder>
struct SquareCoordinates {
  uint32 at;
  uint32 later;  // for chunks 4 to 7 of eight, counted from the warp's first: if that is chunk 4, they are in the next

  __device__ __forceinline__ SquareCoordinates(uint32 tile_s, int first_outer) {
    const uint32 lane = lane_index(), low = lane / 8 % 2, high = lane / 16;
    const uint32 outer = kOrder == Order::kOuterFirst ? low : high, inner = kOrder == Order::kOuterFirst ? high : low;
    const uint32 line = Tile::kAlong ? first_outer + 8 * outer + lane % 8 : 8 * inner + lane % 8;
    at = tile_s + Tile::Swizzled::offset(line, Tile::kAlong ? inner : first_outer / kChunkItems + outer);
    later = at + first_outer / 32 % 2 * (8 * kChunkBytes);
  }

  // To another stage.
  __device__ __forceinline__ void move(uint32 bytes) {
    at += bytes;
    later += bytes;
  }

  // Chunks of a group, and of a step, are even numbers apart: an XOR of the address adds them to the swizzled chunk.
  __device__ __forceinline__ void load(uint32 (&r)[4], int group, int step) const {
    constexpr int kRowBytes = Tile::Swizzled::kRowBytes;
    if constexpr (Tile::kAlong) {
      ldmatrix(r, (at ^ (2 * step * kChunkBytes)) + group * 16 * kRowBytes);
    } else {
      const uint32 first = (group % 4 < 2 ? at : later) ^ (2 * (group % 4) * kChunkBytes);
      ldmatrix_trans(r, first + group / 4 * (8 * kChunkBytes) + step * 16 * kRowBytes);
    }
  }
};

// The instruction of a product, by the type of its sums: 16 rows by 8 columns by 16 items of float16 (or bfloat16), or
// as many pairs of int8 that are neighbours along the sum, so that lines lie along it.
template <typename Scalar>
__device__ __forceinline__ void multiply_step(float (&acc)[4], const uint32 (&a)[2][2], const uint32 (&b)[2]) {
  mma_m16n8k16<Scalar>(acc, a[0], a[1], b[0], b[1]);
}
template <typename Scalar>
__device__ __forceinline__ void multiply_step(int32 (&acc)[4], const uint32 (&a)[2][2], const uint32 (&b)[2]) {
  mma_m16n8k32_s8(acc, a[0], a[1], b[0], b[1]);
}

// Advance the number of a stage in the ring, and return the distance in bytes.
template <uint32 kStageBytes>
__device__ __forceinline__ uint32 next_in_ring(int& stage) {
  const bool wraps = stage == STAGES - 1;
  stage = wraps ? 0 : stage + 1;
  return wraps ? 0u - (STAGES - 1) * kStageBytes : kStageBytes;
}

// Writes an operand's k-tiles to the stages, piece by piece. An array is copied by cp.async, STAGES - 1 k-tiles ahead
// of the one that is multiplied.
template <typename Loader, uint32 kStageBytes, bool kCopied = Loader::kCopied>
struct StageWriter {
  static constexpr int kPieces = Loader::kFetches;
  static constexpr int kInner = Loader::Tile::kInner;
  Loader& loader;
  uint32 to_s;  // where this thread's pieces go
  int stage;    // that is filled

  __device__ __forceinline__ StageWriter(Loader& array, uint32 first_stage_s)
      : loader(array), to_s(first_stage_s + Loader::Chunks::shared_offset()), stage(0) {}

  // K-tile `ahead` of those before the loop, of which `valid` of `items` items of the sum exist.
  __device__ __forceinline__ void begin(int ahead, int items, int valid) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) loader.copy(to_s, i, valid);
    next(items);
  }

  // Piece i of the k-tile that is copied while `tiles` are left: nothing but zeros if there is none.
  __device__ __forceinline__ void piece(int i, int tiles) { loader.copy(to_s, i, tiles > STAGES - 1 ? kInner : 0); }

  __device__ __forceinline__ void next(int items) {
    loader.advance(items);
    to_s += next_in_ring<kStageBytes>(stage);
  }
};

// Codes pass registers: they are loaded two k-tiles ahead of the one that is multiplied, and a k-tile later stored as
// numbers.
template <typename Loader, uint32 kStageBytes>
struct StageWriter<Loader, kStageBytes, false> {
  static constexpr int kPieces = Loader::kFetches * Loader::kStores;
  static constexpr int kInner = Loader::Tile::kInner;
  Loader& loader;
  uint32 to_s;
  int stage;
  typename Loader::Fetched fetched[Loader::kFetches];

  __device__ __forceinline__ StageWriter(Loader& weight, uint32 first_stage_s)
      : loader(weight), to_s(first_stage_s + Loader::Chunks::shared_offset()), stage(0), fetched{} {}

  __device__ __forceinline__ void begin(int ahead, int items, int valid) {
    if (ahead > 1) return;
#pragma unroll
    for (int i = 0; i < Loader::kFetches; i++) loader.template load<true>(fetched[i], i, 0, valid);
    loader.advance(items);
    if (ahead > 0) return;
#pragma unroll
    for (int i = 0; i < kPieces; i++) loader.store(to_s, fetched[i / Loader::kStores], i);
    to_s += next_in_ring<kStageBytes>(stage);
  }

  __device__ __forceinline__ void piece(int i, int tiles) {
    const int own = i / Loader::kStores;
    loader.store(to_s, fetched[own], i);
    if ((i + 1) % Loader::kStores == 0) loader.template load<false>(fetched[own], own, 0, tiles > 2 ? kInner : 0);
  }

  __device__ __forceinline__ void next(int items) {
    loader.advance(items);
    to_s += next_in_ring<kStageBytes>(stage);
  }
};

// Sum is float for items of Scalar, int32 for pairs of int8.
template <typename LoaderA_, typename LoaderB_, int kWarpRows, int kWarpColumns, typename Sum = float,
          typename Scalar = float16>
struct AsyncProduct {
  using LoaderA = LoaderA_;
  using LoaderB = LoaderB_;
  using TileA = typename LoaderA::Tile;
  using TileB = typename LoaderB::Tile;
  static constexpr int kStages = STAGES;
  static constexpr int kInner = TileA::kInner;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kNTiles = kWarpColumns / 8;
  static constexpr int kSteps = kInner / 16;
  static constexpr int kWarpsAcross = TileB::kOuter / kWarpColumns;
  static constexpr uint32 kStageBytes = TileA::kBytes + TileB::kBytes;

  static constexpr int kStepPairs = kNTiles / 2;
  static constexpr int kPairs = kSteps * kStepPairs;  // of a k-tile
  static constexpr int kAhead = 2;                    // pairs that B is read ahead
  static constexpr int kRing = kPairs % 3 == 0 ? 3 : 4;
  static constexpr int kNextTilePair = kPairs - kAhead;  // the first pair that reads the next k-tile
  using WriterA = StageWriter<LoaderA, kStageBytes>;
  using WriterB = StageWriter<LoaderB, kStageBytes>;
  static constexpr int kCopies = WriterA::kPieces + WriterB::kPieces;
  static_assert(kWarpRows % 32 == 0 && kWarpColumns % 32 == 0, "groups of chunks that an XOR reaches");
  static_assert(TileA::kInner == TileB::kInner && kSteps % 2 == 0 && kPairs % kRing == 0, "sets and rings close");
  static_assert(kStages >= 3, "codes are loaded for the third k-tile while the first is multiplied");
  static_assert(A_SETS == 1 || A_SETS == 2, "one step's fragments, or two");

  using Accumulators = Sum[kMTiles][kNTiles][4];

  // Of each tile of rows or columns: items 0-7 of a step, then items 8-15.
  uint32 fragments_a[A_SETS][kMTiles][2][2];
  uint32 fragments_b[kRing][2][2];
  WriterA writer_a;
  WriterB writer_b;
  SquareCoordinates<TileA, Order::kOuterFirst> coordinates_a;
  SquareCoordinates<TileB, Order::kInnerFirst> coordinates_b;
  int read_stage;
  int tiles;  // that are still to be multiplied

  // Begin the copies of the first k-tiles. Of the very first, `first_items` items of the sum exist.
  __device__ __forceinline__ AsyncProduct(LoaderA& a, LoaderB& b, uint32 stages_s, int k_tiles, int first_items)
      : writer_a(a, stages_s),
        writer_b(b, stages_s + TileA::kBytes),
        coordinates_a(stages_s, warp_index() / kWarpsAcross * kWarpRows),
        coordinates_b(stages_s + TileA::kBytes, warp_index() % kWarpsAcross * kWarpColumns),
        read_stage(0),
        tiles(k_tiles) {
#pragma unroll
    for (int ahead = 0; ahead < kStages - 1; ahead++) {
      const int items = ahead == 0 ? first_items : kInner, valid = ahead < k_tiles ? items : 0;
      writer_a.begin(ahead, items, valid);
      writer_b.begin(ahead, items, valid);
      cp_async_commit_group();
    }
  }

  __device__ __forceinline__ void copy(int piece) {
    if (piece < WriterA::kPieces) {
      writer_a.piece(piece, tiles);
    } else {
      writer_b.piece(piece - WriterA::kPieces, tiles);
    }
  }

  __device__ __forceinline__ void read_a(int step, int m) {
    uint32 r[4];
    coordinates_a.load(r, m, step);
#pragma unroll
    for (int i = 0; i < 4; i++) fragments_a[step % A_SETS][m][i / 2][i % 2] = r[i];
  }

  // Pair `pair` of a k-tile.
  __device__ __forceinline__ void read_b(int pair) {
    uint32 r[4];
    coordinates_b.load(r, pair % kStepPairs, pair / kStepPairs);
#pragma unroll
    for (int i = 0; i < 4; i++) fragments_b[pair % kRing][i / 2][i % 2] = r[i];
  }

  // Wait for the copies of the next k-tile, and advance to it.
  __device__ __forceinline__ void next_tile() {
    cp_async_commit_group();
    writer_a.next(kInner);
    writer_b.next(kInner);
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // stages: the next one has been written, and this one read but for registers
    const uint32 distance = next_in_ring<kStageBytes>(read_stage);
    coordinates_a.move(distance);
    coordinates_b.move(distance);
  }

  // One k-tile, and the first fragments of the next.
  __device__ __forceinline__ void tile(Accumulators& acc) {
#pragma unroll
    for (int pair = 0; pair < kPairs; pair++) {
      const int step = pair / kStepPairs, n = pair % kStepPairs * 2, next_step = (step + 1) % kSteps;
      const bool last = pair % kStepPairs == kStepPairs - 1, last_but_one = pair % kStepPairs == kStepPairs - 2;
      if (pair == kNextTilePair) next_tile();
      read_b((pair + kAhead) % kPairs);
      if (pair < kNextTilePair) {
#pragma unroll
        for (int i = pair * kCopies / kNextTilePair; i < (pair + 1) * kCopies / kNextTilePair; i++) copy(i);
      }
#pragma unroll
      for (int m = 0; m < kMTiles; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int own = m % 2 ? 1 - i : i;  // neighbouring products share a fragment
          multiply_step<Scalar>(acc[m][n + own], fragments_a[step % A_SETS][m], fragments_b[pair % kRing][own]);
        }
        if (A_SETS == 1 ? last : m < kMTiles / 2 ? last_but_one : last) read_a(next_step, m);
      }
    }
    tiles--;
  }

  // acc += A B.
  __device__ __forceinline__ void add_to(Accumulators& acc) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // stages: the first one has been written
#pragma unroll
    for (int m = 0; m < kMTiles; m++) read_a(0, m);
#pragma unroll
    for (int pair = 0; pair < kAhead; pair++) read_b(pair);
#pragma unroll 1
    while (tiles > 0) tile(acc);
    cp_async_wait_group<0>();
  }
};
