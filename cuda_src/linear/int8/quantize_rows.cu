// int8 codes and a scale of each row, perhaps with rotated blocks (common/row_codes.cuh has the equations).
//
// Shapes    x (rows, length), items of a row contiguous, rows of any distance; codes (rows, length) and scales (rows,)
//           in C order. length is a multiple of 32, with ROTATED of 64.
// Work      LANES threads own a row: a warp, or the CTA. A thread owns 16 bytes of each of STRIPS segments of LANES *
//           16 bytes. Grid ceil(rows / (THREADS / LANES)).
// Budget    registers: 32 or fewer floats of a RESIDENT row, which is read once. A longer row is read twice, STRIPS
//           segments at a time. Shared memory: a word for each warp.
// Barriers  two, if a row has several warps.
// Edges     in row_codes.cuh: rows of zeros, rows that are not finite.
#if !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(STRIPS) || !defined(VEC) || \
    !defined(RESIDENT) || !defined(ROTATED)
#error "DTYPE, THREADS, LANES, STRIPS, VEC, RESIDENT and ROTATED come from a launch-configuration table"
#endif
#include "../../common/row_codes.cuh"
#include "../../common/vec.cuh"

constexpr int kItems = kVectorBytes / sizeof(DTYPE);  // of a thread in a segment
constexpr int kSegmentItems = LANES * kItems;
constexpr int kRowsPerCta = THREADS / LANES;
static_assert(LANES == kWarpSize || LANES == THREADS, "a row belongs to a warp, or to the CTA");
static_assert(VEC == 1 || VEC * sizeof(DTYPE) == kVectorBytes, "single items or whole vectors");

using Pieces = float[STRIPS][kItems];

__device__ __forceinline__ int first_column(int segment) {
  return segment * kSegmentItems + threadIdx.x % LANES * kItems;
}

// Load STRIPS segments from `segment` on, and rotate them. Items beyond the row are 0. Their loads read the row's last
// items instead: a load under a condition would have to arrive before the next one is issued.
__device__ __forceinline__ void load_pieces(Pieces& v, const DTYPE* row_g, int segment, int length) {
#pragma unroll
  for (int piece = 0; piece < STRIPS; piece++) {
    const DTYPE* source = row_g + min(first_column(segment + piece), length - kItems);
    if constexpr (VEC > 1) {
      load_vec(v[piece], source);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; i++) v[piece][i] = to_float(source[i]);
    }
  }
#pragma unroll
  for (int piece = 0; piece < STRIPS; piece++) {
    const bool exists = first_column(segment + piece) < length;
#pragma unroll
    for (int i = 0; i < kItems; i++) v[piece][i] = exists ? v[piece][i] : 0.f;
    if constexpr (ROTATED) rotate_blocks(v[piece]);
  }
}

__device__ __forceinline__ void store_pieces(signed char* row_g, const Pieces& v, const RowCodes& codes, int segment,
                                             int length) {
#pragma unroll
  for (int piece = 0; piece < STRIPS; piece++) {
    const int column = first_column(segment + piece);
    if (column < length) codes.store(row_g + column, v[piece]);
  }
}

__device__ __forceinline__ uint32 row_max(uint32 most, uint32* partial_s) {
  if constexpr (LANES == kWarpSize) {
    return warp_reduce<MaxBits>(most);
  } else {
    return cta_reduce<MaxBits, THREADS>(most, partial_s);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const DTYPE* x_g, signed char* codes_g, float* scales_g, int64 x_stride, int64 rows, int32 length) {
  __shared__ uint32 partial_s[THREADS / kWarpSize];

  // Phase 1: the row of these threads. Warps beyond the last row compute it again, and store nothing.
  const int64 row = blockIdx.x * static_cast<int64>(kRowsPerCta) + threadIdx.x / LANES;
  const bool exists = row < rows;
  const int64 own = exists ? row : rows - 1;
  const DTYPE* row_g = x_g + own * x_stride;
  signed char* out_g = codes_g + own * length;
  const int stored = exists ? length : 0;

  // Phase 2: its largest absolute value.
  Pieces v;
  uint32 most = 0;
  for (int segment = 0; segment == 0 || !RESIDENT && segment * kSegmentItems < length; segment += STRIPS) {
    load_pieces(v, row_g, segment, length);
#pragma unroll
    for (int piece = 0; piece < STRIPS; piece++) most = max_bits(most, v[piece]);
  }
  const RowCodes codes = RowCodes::of<ROTATED>(row_max(most, partial_s));
  if (exists && threadIdx.x % LANES == 0) scales_g[row] = codes.scale;

  // Phase 3: the codes, from the registers or a second read.
  if constexpr (RESIDENT) {
    store_pieces(out_g, v, codes, 0, stored);
  } else {
    for (int segment = 0; segment * kSegmentItems < length; segment += STRIPS) {
      load_pieces(v, row_g, segment, length);
      store_pieces(out_g, v, codes, segment, stored);
    }
  }
}
