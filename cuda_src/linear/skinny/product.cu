// y = act(x w + b) + residual for few rows of x, on tensor cores: w is read once, at the speed of memory.
//
// The kernel is bound by bytes in flight, not by arithmetic. A warp loads a burst of STEPS * 32 items of K of its
// columns of w and of the rows of x, multiplies them, and loads the next; the bursts of other warps hide its latency
// (weights.cuh has the fragments). Weights bypass L1 and shared memory; x is read through L1, which warps and CTAs
// share.
//
// Shapes    tile.cuh. Arrays of DTYPE. M up to 8 X_TILES; any N and K; OUT is DTYPE, or float32 for the sums of
//           a split K (merge.cu).
// Work      A warp sums 16 W_TILES columns of w for all rows of x, over every K_WARPS-th burst of its part of K.
//           K_WARPS warps of a CTA share the columns; GROUPS such groups have neighbouring columns. Grid: splits *
//           ceil(N / columns of a CTA); the tiles of one split are neighbours.
// Budget    registers: 4 W_TILES X_TILES sums, 8 STEPS W_TILES of w, 4 X_SLOTS X_TILES of x. Shared memory: the sums of
//           all warps for 8 PASS_TILES rows, at most 32 KiB.
// Edges     k beyond K: zeros on both sides, not read. Columns beyond N and rows beyond M: sums of the last ones or of
//           zeros, which are not stored.
#if !defined(DTYPE) || !defined(W_ALONG_K) || !defined(VEC) || !defined(ACTIVATION) || !defined(GATED) ||       \
    !defined(OUT) || !defined(W_TILES) || !defined(X_TILES) || !defined(X_SLOTS) || !defined(STEPS) ||          \
    !defined(GROUPS) || !defined(K_WARPS) || !defined(PASS_TILES) || !defined(MIN_CTAS) || !defined(THREADS) || \
    !defined(SHARED_BYTES)
#error \
    "DTYPE, W_ALONG_K, VEC, ACTIVATION, GATED, OUT, W_TILES, X_TILES, X_SLOTS, STEPS, GROUPS, K_WARPS, PASS_TILES, \
MIN_CTAS, THREADS and SHARED_BYTES come from a launch-configuration table"
#endif
#include "../../common/mma.cuh"
#include "weights.cuh"

template <bool kAlongK, typename Tile>
struct WeightsOf {
  using Type = WeightsAlongK<Tile, STEPS, VEC, DTYPE>;
};
template <typename Tile>
struct WeightsOf<false, Tile> {
  using Type = WeightsAlongN<Tile, STEPS, VEC, DTYPE>;
};

struct Traits {
  static constexpr int kWTiles = W_TILES;
  static constexpr int kXTiles = X_TILES;
  static constexpr int kXSlots = X_SLOTS;
  static constexpr int kSteps = STEPS;
  static constexpr int kGroups = GROUPS;
  static constexpr int kKWarps = K_WARPS;
  static constexpr int kPassTiles = PASS_TILES;
  static constexpr int kWarps = kGroups * kKWarps;
  static constexpr int kBurstItems = kSteps * kStepItems;
  static constexpr int kPassRows = 8 * kPassTiles;
  using Tile = ColumnTile<16 * kWTiles, GATED>;
  using Weights = WeightsOf<W_ALONG_K, Tile>::Type;
  static constexpr int kCtaColumns = kGroups * Tile::kColumns;
  using Part = CtaPart<sizeof(OUT) == sizeof(float), kGroups * Tile::kResults, kBurstItems>;
  // A product of 16 columns and 8 rows is one chain of dependent instructions: two chains halve the wait.
  static constexpr int kChains = kWTiles * kXTiles == 1 ? 2 : 1;
  // Four floats more than columns: the four rows that a quarter of a warp stores at once start 8 banks apart.
  static constexpr int kLine = Tile::kColumns + 4;

  static_assert(kWarps * kWarpSize == THREADS, "the table derives the threads");
  static_assert(kXTiles % kPassTiles == 0 && kXSlots <= kSteps, "whole passes");
  static_assert(kCtaColumns <= THREADS, "a thread has one bias");
};

struct Smem {
  float sums[Traits::kWarps][Traits::kPassRows][Traits::kLine];
  float bias[Traits::kCtaColumns];
};
static_assert(sizeof(Smem) == SHARED_BYTES && sizeof(Smem) <= 32768, "the table derives the shared memory");
static_assert(sizeof(ThinParams) == THIN_PARAMS_BYTES, "its dtype in Python describes another struct");

using Tile = Traits::Tile;
using Sums = float[Traits::kChains][Traits::kWTiles][Traits::kXTiles][4];
using Inputs = InputRows<Traits::kXTiles, Traits::kXSlots, VEC, DTYPE>;

// The second 32 slots of a line are shifted by four banks: of 64 columns that lie along N, those that a warp reads at
// once come from both.
__device__ __forceinline__ int shared_slot(int slot) { return slot + slot / 32 * 4; }

// The bias of one of the CTA's columns, loaded before the products.
__device__ __forceinline__ uint16 load_bias(const DTYPE* b_g, const ThinParams& params, int first) {
  const int group = threadIdx.x / Tile::kColumns, column = threadIdx.x % Tile::kColumns;
  const int result = Tile::result(first + group * Tile::kResults, column);
  const bool exists = threadIdx.x < Traits::kCtaColumns && result < params.outer;
  return load_bias(b_g, Tile::half(column, params.outer) + result, exists);
}

__device__ __forceinline__ void multiply(Sums& sums, const Traits::Weights& weights, const Inputs& inputs, int step) {
#pragma unroll
  for (int quarter = 0; quarter < 4; quarter++) {
#pragma unroll
    for (int i = 0; i < Traits::kWTiles; i++) {
      uint32 a[2];
      weights.fragment(a, step, quarter, i);
#pragma unroll
      for (int j = 0; j < Traits::kXTiles; j++) {
        mma_m16n8k8<DTYPE>(sums[quarter % Traits::kChains][i][j], a, inputs.fragment(step, quarter, j));
      }
    }
  }
}

// One burst: all loads of w and the first of x, then the products.
__device__ __forceinline__ void burst(Sums& sums, Traits::Weights& weights, Inputs& inputs, int k, int end) {
  weights.load(k, end);
#pragma unroll
  for (int step = 0; step < Traits::kXSlots; step++) inputs.load(step, k, end);
#pragma unroll
  for (int step = 0; step < Traits::kSteps; step++) {
    multiply(sums, weights, inputs, step);
    if (step + Traits::kXSlots < Traits::kSteps) inputs.load(step + Traits::kXSlots, k, end);
  }
}

// The accumulators of PASS_TILES tiles of x: c[0], c[1] are row g of the m16 tile and rows 2t, 2t + 1 of x.
__device__ __forceinline__ void store_sums(Smem& smem, const Sums& sums, int first_tile) {
#pragma unroll
  for (int j = 0; j < Traits::kPassTiles; j++) {
#pragma unroll
    for (int i = 0; i < Traits::kWTiles; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int row = 8 * j + 2 * lane_in_group() + c % 2;
        const int slot = shared_slot(16 * i + 8 * (c / 2) + lane_group());
        float sum = sums[0][i][first_tile + j][c];
        if (Traits::kChains == 2) sum += sums[Traits::kChains - 1][i][first_tile + j][c];
        smem.sums[warp_index()][row][slot] = sum;
      }
    }
  }
}

// The sum over a group's warps, in their order, with the bias.
__device__ __forceinline__ float total(const Smem& smem, int group, int row, int column) {
  const int slot = shared_slot(Traits::Weights::slot(column));
  float sum = smem.bias[group * Tile::kColumns + column];
#pragma unroll
  for (int warp = 0; warp < Traits::kKWarps; warp++) sum += smem.sums[group * Traits::kKWarps + warp][row][slot];
  return sum;
}

// A warp takes a row of one group's results at a time.
template <typename Finish>
__device__ __forceinline__ void store_results(const Smem& smem, const ThinParams& params, int first, int first_row,
                                              const Finish& finish) {
  for (int task = warp_index(); task < Traits::kPassRows * Traits::kGroups; task += Traits::kWarps) {
    const int row = task % Traits::kPassRows, group = task / Traits::kPassRows;
    if (first_row + row >= params.rows) continue;
#pragma unroll
    for (int column = lane_index(); column < Tile::kResults; column += kWarpSize) {
      const int result = first + group * Tile::kResults + column;
      if (result >= params.outer) continue;
      const float up = Tile::kGated ? total(smem, group, row, column + Tile::kResults) : 0.f;
      finish.store(params, first_row + row, result, total(smem, group, row, column), up);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_thin(const DTYPE* x_g, const DTYPE* w_g, const DTYPE* b_g, const DTYPE* residual_g, DTYPE* preactivation_g,
                OUT* out_g, const ThinParams params) {
  __shared__ Smem smem;
  const Traits::Part part(params);
  const int group = warp_index() / Traits::kKWarps;

  // Phase 1: products. The group's warps take the bursts of this split of K in rotation, and all iterate equally often.
  const uint16 bias = load_bias(b_g, params, part.first);
  Traits::Weights weights(w_g, params, part.first + group * Tile::kResults);
  Inputs inputs(x_g, params);
  Sums sums = {};
  const int end = part.end(params);
  int k = (part.from + warp_index() % Traits::kKWarps) * Traits::kBurstItems;
#pragma unroll 1
  for (int step_of_warp = part.from; step_of_warp < part.to; step_of_warp += Traits::kKWarps) {
    burst(sums, weights, inputs, k, end);
    k += Traits::kKWarps * Traits::kBurstItems;
  }

  // Phase 2: the sum over warps and its epilogue, some rows of x at a time.
  if (threadIdx.x < Traits::kCtaColumns) smem.bias[threadIdx.x] = bias_of<DTYPE>(bias);
  OUT* part_g = out_g + static_cast<int64>(part.split) * params.rows * params.out_stride;
  const Epilogue<ACTIVATION, GATED, OUT, DTYPE> finish = {residual_g, preactivation_g, part_g};
#pragma unroll
  for (int tile = 0; tile < Traits::kXTiles; tile += Traits::kPassTiles) {
    if (tile > 0) __syncthreads();  // smem.sums: the rows of the pass before have been read
    store_sums(smem, sums, tile);
    __syncthreads();  // smem.sums and smem.bias: written by every warp
    store_results(smem, params, part.first, 8 * tile, finish);
  }
}
