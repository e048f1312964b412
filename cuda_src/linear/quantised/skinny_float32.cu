// y = act(x w + b) + residual for few rows of x and a w in four or eight bits, in float32 arithmetic: the packed bytes
// are read once, and decoded to float32 in registers.
//
// Lanes lie along K: each reads 16 bytes of a column, a warp reads 512, a run. x of a run is in shared memory as
// float32; a lane finds four of its k in 16 bytes: piece c of lane l is at c * 32 + (l ^ c), with eight bits at c * 32
// + (l ^ 2 c), so that neither the lanes that read a piece nor the threads that store neighbouring k have bank
// conflicts.
//
// Shapes    skinny/tile.cuh, W (N, K) as in formats.cuh, in C order. Any M and N, K a multiple of
//           32. BLOCK_SIZE 0: an Int8 with a scale for each column.
// Work      A warp sums COLUMNS columns for ROWS rows of x. Grid: ceil(M / ROWS) * ceil(N / columns of a CTA); tiles of
//           rows are neighbours, which read the codes from L2.
// Budget    registers: COLUMNS * ROWS sums, 4 ROWS of x, 6 COLUMNS of codes and scales. Shared memory: ROWS * 4 KiB,
//           or 2 KiB with eight bits.
// Edges     k beyond K: zeros of x, not read. Rows beyond M are zeros, columns beyond N the last one: not stored.
#if !defined(FORMAT) || !defined(BLOCK_SIZE) || !defined(DTYPE) || !defined(VEC) || !defined(ACTIVATION) || \
    !defined(GATED) || !defined(ROWS) || !defined(COLUMNS) || !defined(MIN_CTAS) || !defined(THREADS) ||    \
    !defined(SHARED_BYTES)
#error \
    "FORMAT, BLOCK_SIZE, DTYPE, VEC, ACTIVATION, GATED, ROWS, COLUMNS, MIN_CTAS, THREADS and SHARED_BYTES come from a \
launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../float32/operands.cuh"
#include "../skinny/tile.cuh"
#include "formats.cuh"

struct Traits {
  using Format = FORMAT;
  using Scalar = DTYPE;
  static constexpr int kRows = ROWS;
  static constexpr int kColumns = COLUMNS;
  static constexpr int kWarps = THREADS / kWarpSize;
  static constexpr int kLaneItems = kVectorBytes * 8 / Format::kBits;  // k of a lane's load
  static constexpr int kRunItems = kWarpSize * kLaneItems;
  static constexpr int kPieces = kLaneItems / 4;
  static constexpr int kBlockItems = BLOCK_SIZE == 0 ? 1 : BLOCK_SIZE;
  using Tile = ColumnTile<kColumns, GATED>;

  static_assert(kWarps * kWarpSize == THREADS, "whole warps");
  static_assert(kRows * Tile::kResults <= kWarpSize, "a lane finishes one result");
  static_assert(BLOCK_SIZE == 0 || BLOCK_SIZE % kLaneItems == 0, "a lane's k are of one block");
};
using Format = Traits::Format;
using Scalar = Traits::Scalar;
using Tile = Traits::Tile;

struct Smem {
  float4 x[Traits::kRows][Traits::kPieces * kWarpSize];
};
static_assert(sizeof(Smem) == SHARED_BYTES && SHARED_BYTES <= 49152, "the table derives the shared memory");
static_assert(sizeof(ThinParams) == THIN_PARAMS_BYTES, "its dtype in Python describes another struct");

__device__ __forceinline__ int place_of(int piece, int lane) {
  return piece * kWarpSize + (lane ^ piece * (8 / Traits::kPieces));
}

// A run of x from k on, which all threads load.
__device__ __forceinline__ void load_run(Smem& smem, const Scalar* x_g, const ThinParams& params, int first_row,
                                         int k) {
  constexpr int kRunPieces = Traits::kPieces * kWarpSize;
#pragma unroll 2  // of eight rows more loads than registers allow
  for (int row = 0; row < Traits::kRows; row++) {
    const bool exists = first_row + row < params.rows;
#pragma unroll
    for (int i = threadIdx.x; i < kRunPieces; i += THREADS) {
      Vec<Scalar, 4> items;
      load_items<VEC>(items, x_g + (first_row + row) * params.x_stride + k + 4 * i,
                      exists ? params.inner - k - 4 * i : 0);
      smem.x[row][place_of(i % Traits::kPieces, i / Traits::kPieces)] = make_float4(
          to_float(items.item[0]), to_float(items.item[1]), to_float(items.item[2]), to_float(items.item[3]));
    }
  }
}

// Codes as floats. An integer q below 2^23 in the mantissa of 2^23 is the float 2^23 + q.
struct Decoder {
  float codebook;  // of this lane's entry

  __device__ __forceinline__ Decoder() : codebook(0.f) {
    if constexpr (kIsCodebook) {
#pragma unroll
      for (int i = 0; i < kCodes; i++) codebook = lane_index() % kCodes == i ? kNf4Codebook[i] : codebook;
    }
  }

  // Code i of a word. Lanes hold the codebook, twice: a shuffle uses the low five bits of the index.
  __device__ __forceinline__ float operator()(uint32 word, int i) const {
    if constexpr (kIsCodebook) {
      return __shfl_sync(kFullWarp, codebook, word >> (4 * i ^ 4));
    } else if constexpr (Format::kBits == 8) {
      return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7650 + i)) - (0x1p23f + 128.f);
    } else {
      return __uint_as_float((word >> 4 * i & 15) | 0x4b000000u) - 0x1p23f;
    }
  }

  static constexpr bool kIsCodebook = Format::kEvenHigh;
};

// The scale, and the number that is added to the product; -scale zero of an Int4 is exact.
__device__ __forceinline__ BlockNumbers affine(const BlockNumbers& block) {
  return {block.scale, Format::kShift == Shift::kBefore ? -block.scale * block.shift : block.shift};
}

// A lane's part of COLUMNS columns: codes of a run, and the numbers of their block.
struct PackedColumns {
  const uint4* codes_g;
  const Format::Scale* scales_g;
  const float16* super_scales_g;
  int64 line[Traits::kColumns];  // rows of codes
  uint4 codes[Traits::kColumns];
  BlockNumbers numbers[Traits::kColumns];

  __device__ __forceinline__ PackedColumns(const uint4* codes_g, const Format::Scale* scales_g,
                                           const float16* super_scales_g, const ThinParams& params, int first)
      : codes_g(codes_g), scales_g(scales_g), super_scales_g(super_scales_g) {
#pragma unroll
    for (int i = 0; i < Traits::kColumns; i++) {
      line[i] = min(Tile::result(first, i), params.outer - 1) + Tile::half(i, params.outer);
    }
  }

  __device__ __forceinline__ void load(int k, const ThinParams& params) {
    const int own = min(k + lane_index() * Traits::kLaneItems, params.inner - Traits::kLaneItems);
    const bool exists = k + lane_index() * Traits::kLaneItems < params.inner;
#pragma unroll
    for (int i = 0; i < Traits::kColumns; i++) {
      codes[i] = ld_once_v4(codes_g + (line[i] * params.inner + own) / Traits::kLaneItems, exists);
    }
#pragma unroll
    for (int i = 0; i < Traits::kColumns; i++) {
      constexpr int kSuper = Format::kSuperBlock > 0 ? Format::kSuperBlock : 1;
      const int64 item = line[i] * params.inner + own;
      const int64 block = BLOCK_SIZE == 0 ? line[i] : item / Traits::kBlockItems;
      numbers[i] = affine(block_numbers<Format>(scales_g, super_scales_g, block, item / kSuper));
    }
  }
};

using Sums = float[Traits::kRows][Traits::kColumns];

__device__ __forceinline__ void add_run(Sums& sums, const Smem& smem, const PackedColumns& w, const Decoder& decode) {
  constexpr int kWordPieces = Traits::kPieces / 4;  // of four weights
#pragma unroll
  for (int piece = 0; piece < Traits::kPieces; piece++) {
    float x[Traits::kRows][4];
#pragma unroll
    for (int row = 0; row < Traits::kRows; row++) {
      ld_shared(x[row], shared_address(&smem.x[row][place_of(piece, lane_index())]));
    }
#pragma unroll
    for (int column = 0; column < Traits::kColumns; column++) {
      const uint32 word = word_of(w.codes[column], piece / kWordPieces);
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float q = decode(word, piece % kWordPieces * 4 + i);
        weight[i] = fmaf(q, w.numbers[column].scale, w.numbers[column].shift);
      }
#pragma unroll
      for (int row = 0; row < Traits::kRows; row++) {
        float& sum = sums[row][column];
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(x[row][i], weight[i], sum);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS)
    linear_quantised_thin_f32(const Scalar* x_g, const uint4* codes_g, const Format::Scale* scales_g,
                              const float16* super_scales_g, const Scalar* b_g, const Scalar* residual_g,
                              Scalar* preactivation_g, Scalar* out_g, const ThinParams params) {
  __shared__ Smem smem;
  const int row_tiles = (params.rows + Traits::kRows - 1) / Traits::kRows;
  const int first_row = blockIdx.x % row_tiles * Traits::kRows;
  const int first = (blockIdx.x / row_tiles * Traits::kWarps + warp_index()) * Tile::kResults;

  // Phase 1: products, a run of K at a time.
  const Decoder decode;
  PackedColumns w(codes_g, scales_g, super_scales_g, params, first);
  Sums sums = {};
#pragma unroll 1
  for (int k = 0; k < params.inner; k += Traits::kRunItems) {
    w.load(k, params);
    if (k > 0) __syncthreads();  // smem.x: the run before has been read
    load_run(smem, x_g, params, first_row, k);
    __syncthreads();  // smem.x: written by all threads
    add_run(sums, smem, w, decode);
  }

  // Phase 2: the sum over lanes, each of which finishes one result.
  float z = 0.f, up = 0.f;
#pragma unroll
  for (int row = 0; row < Traits::kRows; row++) {
#pragma unroll
    for (int column = 0; column < Traits::kColumns; column++) {
      const float total = warp_reduce<Sum>(sums[row][column]);
      if (lane_index() != row * Tile::kResults + column % Tile::kResults) continue;
      (column < Tile::kResults ? z : up) = total;
    }
  }
  const int row = first_row + lane_index() / Tile::kResults, result = first + lane_index() % Tile::kResults;
  if (lane_index() >= Traits::kRows * Tile::kResults || row >= params.rows || result >= params.outer) return;
  if (b_g != nullptr) {
    z += to_float(b_g[result]);
    if (Tile::kGated) up += to_float(b_g[static_cast<int64>(params.outer) + result]);
  }
  const Epilogue<ACTIVATION, GATED, Scalar, Scalar> finish = {residual_g, preactivation_g, out_g};
  finish.store(params, row, result, z, up);
}
