// The main loop of a CTA's tile of a product of two operands, each with a tile loader (operand_loader.cuh).
//
// A warp owns kWarpRows x kWarpColumns of the tile. One of two stages in shared memory is multiplied, while the other
// is filled with the next k-tile. The k-tile after that is in flight in registers: in slots spread over the loop, a
// thread stores a piece that it loaded up to a k-tile ago and at once loads another. A slot is the products of 32 rows
// and 32 columns in one step, 8 instructions. Fragments are read a step ahead: B's into registers whose products have
// just been issued, and A's likewise (A_SETS is 1) or into a second set.
#pragma once

#if !defined(MMA_K) || !defined(A_SETS) || !defined(A_SLOT) || !defined(A_STEP) || !defined(A_RING) || \
    !defined(B_SLOT) || !defined(B_STEP) || !defined(B_RING)
#error \
    "MMA_K, A_SETS and the slots A_SLOT, A_STEP, A_RING, B_SLOT, B_STEP, B_RING come from a launch-configuration table"
#endif
#include "operand_loader.cuh"

static_assert(A_SETS == 1 || A_SETS == 2, "one step's fragments, or two");
static_assert(MMA_K == 8 || MMA_K == 16, "mma.m16n8k8, or from sm_80 on m16n8k16");

// The instruction of a product, by the types of its sums and of an operand's items. An instruction multiplies 16 rows
// of A by 8 columns of B.
template <typename Sum, typename Scalar>
struct Instruction;

// Items are float16 (or bfloat16), and a k8 fragment is one step.
template <typename Scalar>
struct Instruction<float, Scalar> {
  static constexpr int kSub = MMA_K / 8;  // k8 fragments of one instruction
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ static void multiply(float (&acc)[4], const uint32 (&a)[kSub][kMTiles][2],
                                                  const uint32 (&b)[kSub][kNTiles], int m, int n) {
    if constexpr (kSub == 1) {
      mma_m16n8k8<Scalar>(acc, a[0][m], b[0][n]);
    } else {
      mma_m16n8k16<Scalar>(acc, a[0][m], a[kSub - 1][m], b[0][n], b[kSub - 1][n]);
    }
  }
};

// Items are pairs of int8 that are neighbours along the sum, so lines lie along it. Bytes, fragments and registers are
// those of float16; a fragment is multiplied by two instructions of half the time each.
template <typename Scalar>
struct Instruction<int32, Scalar> {
  static constexpr int kSub = 1;
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ static void multiply(int32 (&acc)[4], const uint32 (&a)[kSub][kMTiles][2],
                                                  const uint32 (&b)[kSub][kNTiles], int m, int n) {
    mma_m8n8k16_s8_pair(acc, a[0][m], b[0][n]);
  }
};

// The same products of pairs of int8 without tensor cores, from the same fragments (mma.cuh): at each of four words
// along the sum, a lane gets the words of its rows and columns from the lanes that have them.
struct ByteDots {
  static constexpr int kSub = 1;
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ static void multiply(int32 (&acc)[4], const uint32 (&a)[kSub][kMTiles][2],
                                                  const uint32 (&b)[kSub][kNTiles], int m, int n) {
    const int row_lane = lane_index() / 4 * 4, column_lane = lane_index() % 4 * 8;
#pragma unroll 1  // unrolled, the shuffles of many products at a time would spill
    for (int word = 0; word < 4; word++) {
      int rows[2], columns[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        rows[i] = static_cast<int>(__shfl_sync(kFullWarp, a[0][m][i], row_lane + word));
        columns[i] = static_cast<int>(__shfl_sync(kFullWarp, b[0][n], column_lane + 4 * i + word));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) acc[i] = __dp4a(rows[i / 2], columns[i % 2], acc[i]);
    }
  }
};

// The slot in which piece i of a loader is stored: kFirst + i * kStep. kRing loads, each of Loader::kStores pieces, are
// in flight at a time.
template <int kFirst_, int kStep_, int kRing_, typename Loader>
struct Moves {
  static constexpr int kFirst = kFirst_, kStep = kStep_, kRing = kRing_, kPieces = Loader::kFetches * Loader::kStores;
  static constexpr int kLast = kFirst + (kPieces - 1) * kStep;
  static_assert(kRing <= Loader::kFetches, "a piece is loaded at most a k-tile ahead");
};

// Sum is float for items of Scalar, int32 for pairs of int8.
template <typename LoaderA_, typename LoaderB_, int kWarpRows, int kWarpColumns, typename Sum = float,
          typename Scalar = float16, typename Multiplier = Instruction<Sum, Scalar>>
struct TileProduct {
  using LoaderA = LoaderA_;
  using LoaderB = LoaderB_;
  using TileA = typename LoaderA::Tile;
  using TileB = typename LoaderB::Tile;
  static constexpr int kInner = TileA::kInner;
  static constexpr int kMTiles = kWarpRows / 16;
  static constexpr int kNTiles = kWarpColumns / 8;
  static constexpr int kColumnGroups = kWarpColumns / kFragmentOuter;
  static constexpr int kRowGroups = kWarpRows / kFragmentOuter;
  static constexpr int kSub = Multiplier::kSub;
  static constexpr int kSteps = kInner / (8 * kSub);
  static constexpr int kWarpsAcross = TileB::kOuter / kWarpColumns;
  static constexpr uint32 kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kBarrierSlot = (kSteps - 1) * kColumnGroups * kRowGroups + kRowGroups;  // the first after it
  using MovesA = Moves<A_SLOT, A_STEP, A_RING, LoaderA>;
  using MovesB = Moves<B_SLOT, B_STEP, B_RING, LoaderB>;
  static_assert(MovesA::kLast < kBarrierSlot && MovesB::kLast < kBarrierSlot, "every store precedes the barrier");
  static_assert(kWarpRows % kFragmentOuter == 0 && kWarpColumns % kFragmentOuter == 0, "whole ldmatrix.x4");
  static_assert(TileA::kInner == TileB::kInner && kSteps >= 2, "fragments are read a step ahead");
  static_assert(A_SETS == 2 || kColumnGroups > 1, "the next k-tile's are read after the barrier");
  static_assert(Multiplier::kSub == MMA_K / 8, "the table counts other steps");

  using Accumulators = Sum[kMTiles][kNTiles][4];

  struct Fragments {
    uint32 a[A_SETS][kSub][kMTiles][2];
    uint32 b[kSub][kNTiles];
  };

  LoaderA& loader_a;
  LoaderB& loader_b;
  typename LoaderA::Fetched ring_a[MovesA::kRing];
  typename LoaderB::Fetched ring_b[MovesB::kRing];
  FragmentCoordinates<TileA> coordinates_a;
  FragmentCoordinates<TileB> coordinates_b;
  uint32 store_a, store_b;  // where this thread's pieces go: the other stage
  uint32 other_stage;       // the distance to it
  int tiles;                // that are still to be multiplied
  Fragments fragments;

  // Load the first k-tile, of which `first_items` items of the sum exist, into the first stage.
  __device__ __forceinline__ TileProduct(LoaderA& a, LoaderB& b, uint32 stages_s, int k_tiles, int first_items)
      : loader_a(a),
        loader_b(b),
        coordinates_a(stages_s, warp_index() / kWarpsAcross * kWarpRows),
        coordinates_b(stages_s + TileA::kBytes, warp_index() % kWarpsAcross * kWarpColumns),
        store_a(stages_s + LoaderA::Chunks::shared_offset()),
        store_b(stages_s + TileA::kBytes + LoaderB::Chunks::shared_offset()),
        other_stage(kStageBytes),
        tiles(k_tiles) {
    bring_first(loader_a, store_a, first_items);
    bring_first(loader_b, store_b, first_items);
    fill(loader_a, ring_a);
    fill(loader_b, ring_b);
    store_a += kStageBytes;
    store_b += kStageBytes;
  }

  template <typename Loader>
  __device__ __forceinline__ void bring_first(Loader& loader, uint32 to_s, int first_items) const {
    typename Loader::Fetched fetched[Loader::kFetches] = {};
#pragma unroll
    for (int i = 0; i < Loader::kFetches; i++) loader.template load<true>(fetched[i], i, 0, first_items);
#pragma unroll
    for (int i = 0; i < Loader::kFetches * Loader::kStores; i++) loader.store(to_s, fetched[i / Loader::kStores], i);
    loader.advance(first_items);
  }

  // Load the pieces of the second k-tile that the loop stores first. The loader advances to the third.
  template <typename Loader, int kRing>
  __device__ __forceinline__ void fill(Loader& loader, typename Loader::Fetched (&ring)[kRing]) const {
#pragma unroll
    for (int i = 0; i < kRing; i++) {
      ring[i] = {};
      loader.template load<false>(ring[i], i, 0, tiles > 1 ? kInner : 0);
    }
    loader.advance(kInner);
  }

  // The moves of a slot: store a piece to shared memory, and load the next piece into its registers when they are free.
  template <typename LoaderMoves, typename Loader, int kRing>
  __device__ __forceinline__ void move(int slot, Loader& loader, typename Loader::Fetched (&ring)[kRing],
                                       uint32 to_s) const {
#pragma unroll
    for (int i = 0; i < LoaderMoves::kPieces; i++) {
      if (slot != LoaderMoves::kFirst + i * LoaderMoves::kStep) continue;
      const int own = i / Loader::kStores;
      loader.store(to_s, ring[own % kRing], i);
      if ((i + 1) % Loader::kStores != 0) continue;
      const bool wraps = own + kRing >= Loader::kFetches;  // into the k-tile after the next
      const int next = wraps ? own % kRing : own + kRing;
      loader.template load<false>(ring[own % kRing], next, wraps ? 0 : -1, tiles > (wraps ? 2 : 1) ? kInner : 0);
    }
  }

  __device__ __forceinline__ void read_a(int step, int group) {
#pragma unroll
    for (int sub = 0; sub < kSub; sub++) {
      uint32 r[4];
      coordinates_a.load(r, group, step * kSub + sub);
#pragma unroll
      for (int i = 0; i < 4; i++) fragments.a[step % A_SETS][sub][2 * group + i / 2][i % 2] = r[i];
    }
  }

  __device__ __forceinline__ void read_a(int step) {
#pragma unroll
    for (int group = 0; group < kRowGroups; group++) read_a(step, group);
  }

  __device__ __forceinline__ void read_b(int step, int group) {
#pragma unroll
    for (int sub = 0; sub < kSub; sub++) {
      uint32 r[4];
      coordinates_b.load(r, group, step * kSub + sub);
#pragma unroll
      for (int i = 0; i < 4; i++) fragments.b[sub][4 * group + i] = r[i];
    }
  }

  // 32 rows by 32 columns.
  __device__ __forceinline__ void multiply(Accumulators& acc, int step, int row_group, int column_group) const {
#pragma unroll
    for (int n = 4 * column_group; n < 4 * column_group + 4; n++) {
#pragma unroll
      for (int m = 2 * row_group; m < 2 * row_group + 2; m++) {
        Multiplier::multiply(acc[m][n], fragments.a[step % A_SETS], fragments.b, m, n);
      }
    }
  }

  __device__ __forceinline__ void exchange_stages() {
    coordinates_a.move(other_stage);
    coordinates_b.move(other_stage);
    store_a -= other_stage;
    store_b -= other_stage;
    other_stage = 0u - other_stage;
  }

  // One k-tile, and the first fragments of the next.
  __device__ __forceinline__ void tile(Accumulators& acc) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const int next_step = (step + 1) % kSteps;
#pragma unroll
      for (int column_group = 0; column_group < kColumnGroups; column_group++) {
#pragma unroll
        for (int row_group = 0; row_group < kRowGroups; row_group++) {
          const int slot = (step * kColumnGroups + column_group) * kRowGroups + row_group;
          move<MovesA>(slot, loader_a, ring_a, store_a);
          move<MovesB>(slot, loader_b, ring_b, store_b);
          multiply(acc, step, row_group, column_group);
          if (step == kSteps - 1 && column_group == 0 && row_group == kRowGroups - 1) {
            __syncthreads();  // stages: this one has been read, the other one written
            exchange_stages();
          }
          if (A_SETS == 1 && column_group == kColumnGroups - 1) read_a(next_step, row_group);
        }
        if (A_SETS == 2 && column_group == 0) read_a(next_step);
        read_b(next_step, column_group);
      }
    }
    loader_a.advance(kInner);
    loader_b.advance(kInner);
    tiles--;
  }

  // acc += A B.
  __device__ __forceinline__ void add_to(Accumulators& acc) {
    __syncthreads();  // stages: the first one has been written
    read_a(0);
#pragma unroll
    for (int group = 0; group < kColumnGroups; group++) read_b(0, group);
#pragma unroll 1
    while (tiles > 0) tile(acc);
  }
};
