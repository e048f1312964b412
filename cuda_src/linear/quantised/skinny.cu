// y = act(x w + b) + residual for few rows of x and a w in four or eight bits, on tensor cores: the packed bytes are
// read once, at the speed of memory.
//
// As in linear/skinny/product.cu, bursts of loads go directly from memory to the fragments of mma.m16n8k8; columns of w
// are the m16 side, rows of x the n8 side. Four lanes read a span, 64 bytes of one column (skinny_scales.cuh). An
// instruction sums over those four lanes, and each block has its own scale: if a span has several blocks, the lanes
// exchange words so that each instruction stays within one block.
//
// With fewer than eight rows of x the n8 side has room: PARTS neighbouring spans of a column are rows of the m16 side,
// and the same rows of x at their k columns of the n8 side. Only the products of a span with its own k count: result
// (row g, column n) where g % PARTS == n / ROWS. So a warp reads 64 PARTS bytes of a column at once.
//
// Shapes    skinny/tile.cuh, W (N, K) as in formats.cuh, in C order. M up to 8 / PARTS or 8 X_TILES rows of x, or
//           several times that of four tiles; K a multiple of 32, any N; OUT float32 for the sums of a split K
//           (skinny/merge.cu). BLOCK_SIZE 0: an Int8 with a scale for each column, which is applied to the sum.
// Work      A warp sums 16 W_TILES / PARTS columns for all rows of x, over every K_WARPS-th burst of STEPS times PARTS
//           spans; K_WARPS warps share the columns. A CTA has GROUPS such independent groups: a group takes every
//           (GROUPS gridDim)-th of splits * ceil(N / columns of a warp) tiles; the tiles of one split are neighbours.
// Budget    registers: 4 W_TILES X_TILES sums and as many or twice of a block, 8 STEPS W_TILES of codes, 4 X_SLOTS
//           X_TILES of x, and scales. Shared memory: the sums of all warps for 8 PASS_TILES rows, and for Nf4 a table
//           of 32 KiB: at most 48 KiB.
// Edges     k beyond K: zeros of x, not read. Columns beyond N: sums of the last one, which are not stored.
#include "../../common/barrier.cuh"
#include "skinny_loads.cuh"

struct GroupSums {
  float sums[Traits::kKWarps][8 * Traits::kPassTiles][Traits::kLine];  // of each warp
  float bias[Traits::kColumns];
  float scale[Traits::kColumns];  // of columns that have their own
};
struct Smem : Traits::Pairs::Table {
  GroupSums groups[Traits::kGroups];
};
static_assert(sizeof(Smem) == SHARED_BYTES && SHARED_BYTES <= 49152, "the table derives the shared memory");
static_assert(sizeof(ThinParams) == THIN_PARAMS_BYTES, "its dtype in Python describes another struct");

using Pairs = Traits::Pairs;
using Sums = float[Traits::kWTiles][Traits::kXTiles][2][Traits::kLineSums];  // of the two lines of a tile

__device__ __forceinline__ void group_barrier() {
  if constexpr (Traits::kKWarps == 1) {
    __syncwarp();
  } else {
    bar_sync(1 + group_index(), Traits::kGroupThreads);
  }
}
// The products of one block of a step, with its scales applied.
struct BlockSums {
  static constexpr bool kShifted = Traits::Scales::kShifted;
  float products[Traits::kWTiles][Traits::kXTiles][Pairs::kChains][4] = {};
  float inputs[kShifted ? Traits::kXTiles : 1][4] = {};

  __device__ __forceinline__ void multiply(const PackedColumns& w, const InputRows& x, int step, int chunk,
                                           const Pairs::Lookup& lookup) {
    constexpr uint32 kOnes[2] = {0x3c003c00u, 0x3c003c00u};
    const int slot = (step * Traits::kChunks + chunk) % Traits::kXSlots;
#pragma unroll
    for (int i = 0; i < Traits::kChunkWords * Pairs::kPairs; i++) {
      const int word = chunk * Traits::kChunkWords + i / Pairs::kPairs, pair = i % Pairs::kPairs;
      uint32 b[Traits::kXTiles];
#pragma unroll
      for (int j = 0; j < Traits::kXTiles; j++) b[j] = Pairs::input(x.chunks[slot][j], i);
#pragma unroll
      for (int tile = 0; tile < Traits::kWTiles; tile++) {
        const uint32 a[2] = {Pairs::pair(word_of(w.codes[step][2 * tile], word), pair, lookup),
                             Pairs::pair(word_of(w.codes[step][2 * tile + 1], word), pair, lookup)};
#pragma unroll
        for (int j = 0; j < Traits::kXTiles; j++) mma_m16n8k8(products[tile][j][i % Pairs::kChains], a, b[j]);
      }
      if constexpr (kShifted) {
#pragma unroll
        for (int j = 0; j < Traits::kXTiles; j++) mma_m16n8k8(inputs[j], kOnes, b[j]);
      }
    }
  }

  __device__ __forceinline__ void add_to(Sums& sums, const PackedColumns& w, int step, int block) const {
#pragma unroll
    for (int tile = 0; tile < Traits::kWTiles; tile++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const BlockNumbers numbers = w.scales[step][2 * tile + half].of(block);
        const float scale = numbers.scale * Pairs::kFactor;
#pragma unroll
        for (int j = 0; j < Traits::kXTiles; j++) {
#pragma unroll
          for (int i = 0; i < Traits::kLineSums; i++) {
            float& sum = sums[tile][j][half][i];
            sum = fmaf(scale, product(tile, j, half, i), sum);
            if constexpr (kShifted) sum = fmaf(numbers.shift, counted(inputs[j], 0, i), sum);
          }
        }
      }
    }
  }

  // Without scales of blocks.
  __device__ __forceinline__ void add_to(Sums& sums) const {
#pragma unroll
    for (int tile = 0; tile < Traits::kWTiles; tile++) {
#pragma unroll
      for (int j = 0; j < Traits::kXTiles; j++) {
#pragma unroll
        for (int i = 0; i < 2 * Traits::kLineSums; i++) {
          const int half = i / Traits::kLineSums, result = i % Traits::kLineSums;
          sums[tile][j][half][result] += product(tile, j, half, result);
        }
      }
    }
  }

  // Those accumulators of a line that count.
  __device__ __forceinline__ static float counted(const float (&c)[4], int half, int i) {
    if (Traits::kLineSums == 2) return c[2 * half + i];
    return lane_group() % 2 ? c[2 * half + 1] : c[2 * half];
  }
  __device__ __forceinline__ float product(int tile, int j, int half, int i) const {
    const auto& chains = products[tile][j];
    return Pairs::merge(counted(chains[0], half, i), counted(chains[Pairs::kChains - 1], half, i));
  }
};

// The products of a burst that was loaded.
__device__ __forceinline__ void multiply(Sums& sums, Bursts& burst, const Pairs::Lookup& lookup) {
  constexpr int kAll = Traits::kSteps * Traits::kChunks, kPerBlock = div_up(Traits::kChunks, Traits::kBlocks);
  PackedColumns& w = burst.w;
  InputRows& x = burst.x;
#pragma unroll
  for (int step = 0; step < Traits::kSteps; step++) {
#pragma unroll
    for (int i = 0; i < Traits::kLines; i++) trade(w.codes[step][i]);
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; block++) {
      BlockSums block_sums;
#pragma unroll
      for (int i = 0; i < kPerBlock; i++) {
        const int chunk = block * kPerBlock + i, next = step * Traits::kChunks + chunk + Traits::kXSlots;
        block_sums.multiply(w, x, step, chunk, lookup);
        if (next < kAll) x.load(next, burst.k, burst.end);
      }
      if constexpr (Traits::kColumnScale) {
        block_sums.add_to(sums);
      } else {
        block_sums.add_to(sums, w, step, block);
      }
    }
  }
}

// c[0], c[1] are row g of the m16 tile and columns 2t, 2t + 1 of the n8 tile: of parts, those that meet their own k.
__device__ __forceinline__ void store_sums(GroupSums& group, const Sums& sums, int first_tile) {
  auto& own = group.sums[warp_in_group()];
#pragma unroll
  for (int j = 0; j < Traits::kPassTiles; j++) {
#pragma unroll
    for (int i = 0; i < Traits::kLineSums; i++) {
      const int n = 2 * lane_in_group() + (Traits::kLineSums == 2 ? i : lane_group() % 2);
      if (Traits::kParts > 1 && n / Traits::kRows != lane_group() % Traits::kParts) continue;
#pragma unroll
      for (int line = 0; line < Traits::kLines; line++) {
        const int column = (8 * line + lane_group()) / Traits::kParts;
        own[8 * j + n][column] = sums[line / 2][first_tile + j][line % 2][i];
      }
    }
  }
}

// The sum over warps and parts, in their order, with the bias.
__device__ __forceinline__ float total(const GroupSums& group, int row, int column) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < Traits::kKWarps; warp++) {
    float of_warp = 0.f;  // short chains, which wait for each other less
#pragma unroll
    for (int part = 0; part < Traits::kParts; part++) of_warp += group.sums[warp][part * Traits::kRows + row][column];
    sum += of_warp;
  }
  return Traits::kColumnScale ? fmaf(group.scale[column], sum, group.bias[column]) : sum + group.bias[column];
}

// A warp takes a row of results at a time.
template <typename Finish>
__device__ __forceinline__ void store_results(const GroupSums& group, const ThinParams& params, int first,
                                              int first_row, const Finish& finish) {
  for (int row = warp_in_group(); row < Traits::kRows * Traits::kPassTiles; row += Traits::kKWarps) {
    if (first_row + row >= params.rows) continue;
#pragma unroll
    for (int column = lane_index(); column < Tile::kResults; column += kWarpSize) {
      const int result = first + column;
      if (result >= params.outer) continue;
      const float up = Tile::kGated ? total(group, row, column + Tile::kResults) : 0.f;
      finish.store(params, first_row + row, result, total(group, row, column), up);
    }
  }
}

// The bias and scale of one of the group's columns, which a thread loads before the products.
struct ColumnNumbers {
  uint16 bias;
  uint32 scale = 0;

  __device__ __forceinline__ ColumnNumbers(const float16* b_g, const uint32* scales_g, const ThinParams& params,
                                           int first) {
    const int column = group_thread(), result = Tile::result(first, column);
    const bool exists = column < Traits::kColumns && result < params.outer;
    const int64 n = Tile::half(column, params.outer) + result;
    bias = load_bias(b_g, n, exists);
    if (Traits::kColumnScale) scale = ld_u32_if(scales_g + n, exists);
  }

  __device__ __forceinline__ void store(GroupSums& group) const {
    if (group_thread() >= Traits::kColumns) return;
    group.bias[group_thread()] = bias_of(bias);
    group.scale[group_thread()] = __uint_as_float(scale);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_quantised_thin(const float16* x_g, const uint4* codes_g, const uint32* scales_g,
                          const uint32* super_scales_g, const float16* b_g, const float16* residual_g,
                          float16* preactivation_g, OUT* out_g, const ThinParams params) {
  __shared__ Smem smem;
  GroupSums& group = smem.groups[group_index()];
  const uint32 tiles = (params.outer + Tile::kResults - 1) / Tile::kResults * params.splits;
  const uint32 first = blockIdx.x * Traits::kGroups + group_index(), step = gridDim.x * Traits::kGroups;

  // Phase 1: the first loads, and while they are in flight the table.
  Traits::Part next(params, first);
  Bursts bursts(x_g, codes_g, scales_g, super_scales_g, params);
  if (Traits::kAhead) {
    bursts.move_to(params, next, first < tiles);
    bursts.load();
  }
  smem.fill<THREADS>();
  if (Pairs::Table::kEntries > 0) __syncthreads();  // smem.pairs: written by every warp
  const Pairs::Lookup lookup(smem);
#pragma unroll 1
  for (uint32 tile = first; tile < tiles; tile += step) {
    if (!Traits::kAhead) {
      next = Traits::Part(params, tile);
      bursts.move_to(params, next, true);
    }
    const Traits::Part part = next;

    // Phase 2: products. The group's warps take the bursts of this split of K in rotation, and all iterate equally
    // often.
    const ColumnNumbers column(b_g, scales_g, params, part.first);
    Sums sums = {};
#pragma unroll 1
    for (int step_of_warp = part.from; step_of_warp < part.to; step_of_warp += Traits::kKWarps) {
      if (!Traits::kAhead) bursts.load();
      multiply(sums, bursts, lookup);
      bursts.k += Traits::kKWarps * Traits::kBurstItems;
      if (!Traits::kAhead) continue;
      if (step_of_warp + Traits::kKWarps >= part.to) {
        next = Traits::Part(params, tile + step);
        bursts.move_to(params, next, tile + step < tiles);
      }
      bursts.load();
    }

    // Phase 3: the sum over warps and its epilogue, some rows of x at a time.
    OUT* part_g = out_g + static_cast<int64>(part.split) * params.rows * params.out_stride;
    const Epilogue<ACTIVATION, GATED, OUT> finish = {residual_g, preactivation_g, part_g};
    if (tile != first) group_barrier();  // group: the tile before has been read
    column.store(group);
#pragma unroll
    for (int j = 0; j < Traits::kXTiles; j += Traits::kPassTiles) {
      if (j > 0) group_barrier();  // group.sums: the rows of the pass before have been read
      store_sums(group, sums, j);
      group_barrier();  // group: written by its warps
      store_results(group, params, part.first, 8 * j, finish);
    }
  }
}
