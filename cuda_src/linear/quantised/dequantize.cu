// The numbers of codes and scales (formats.cuh).
//
//   out[n, k] = w[n, k] in float32 arithmetic, rounded once to DTYPE
//
// Shapes    codes and scales of a weight (N, K); out with any strides, so that it may be (K, N) too.
// Work      a thread owns UNIT neighbouring k of a row n, all of one block, and loads their codes in words of up to 16
//           bytes. With ALONG, neighbouring threads have neighbouring units of a row, for an out that is contiguous
//           along K, and store VEC items at once; otherwise they have neighbouring rows, for one contiguous along N.
//           Grid ceil(N * K / UNIT / THREADS).
// Budget    registers for the codes of a unit; Nf4's codebook in 64 bytes of shared memory, an entry a bank.
// Edges     a scale that is NaN gives NaN. Subnormal results are 0.
#if !defined(FORMAT) || !defined(DTYPE) || !defined(THREADS) || !defined(UNIT) || !defined(ALONG) || !defined(VEC)
#error "FORMAT, DTYPE, THREADS, UNIT, ALONG and VEC come from a launch-configuration table"
#endif
#include "../../common/vec.cuh"
#include "formats.cuh"

// Field for field DEQUANTIZE_PARAMS of cupyattn/ops/linear/kernels_quantised.py. Strides are in items.
struct DequantizeParams {
  int64 inner_stride, outer_stride;
  uint32 outer;       // N
  uint32 units;       // of a row
  uint32 block_size;  // in weights
};
static_assert(sizeof(DequantizeParams) == DEQUANTIZE_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kBytes = UNIT * FORMAT::kBits / 8;
constexpr int kPiece = kBytes < kVectorBytes ? kBytes : kVectorBytes;  // of one load
constexpr int kStored = 8;                                             // items that are computed before they are stored
constexpr int kLeastBlock = 32;
static_assert(kBytes % kPiece == 0 && UNIT % kStored == 0 && kLeastBlock % UNIT == 0, "whole loads, of one block");
static_assert(VEC == 1 || ALONG && VEC * sizeof(DTYPE) == kVectorBytes, "single items or whole vectors");

// Nf4's numbers in shared memory, an entry a bank: lanes look up different entries without conflicts.
__device__ __forceinline__ const float* filled_codebook() {
  if constexpr (FORMAT::kCodebook) {
    __shared__ float codebook_s[kCodes];
#pragma unroll
    for (int q = 0; q < kCodes; q++) {
      if (threadIdx.x == q) codebook_s[q] = kNf4Codebook[q];
    }
    __syncthreads();  // codebook_s: filled
    return codebook_s;
  } else {
    return nullptr;
  }
}

// The i-th code of a unit (formats.cuh).
__device__ __forceinline__ float number(const uint32 (&word)[kBytes / 4], int i, const float* codebook_s) {
  const int bit = (FORMAT::kEvenHigh ? i ^ 1 : i) * FORMAT::kBits;
  const uint32 lowest = word[bit / 32] >> bit % 32;
  if constexpr (FORMAT::kBits == 8) {
    return static_cast<float>(static_cast<signed char>(lowest));
  } else if constexpr (FORMAT::kCodebook) {
    return codebook_s[lowest & 15u];
  } else {
    return static_cast<float>(lowest & 15u);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize(const FORMAT::Code* __restrict__ codes_g, const FORMAT::Scale* __restrict__ scales_g,
               const float16* __restrict__ super_scales_g, DTYPE* __restrict__ out_g, const DequantizeParams params) {
  const float* codebook_s = filled_codebook();

  // Phase 1: the unit of this thread.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const uint32 across = ALONG ? params.units : params.outer;
  const uint32 quotient = thread / across, remainder = thread - quotient * across;
  const uint32 row = ALONG ? quotient : remainder, unit = ALONG ? remainder : quotient;
  if (row >= params.outer || unit >= params.units) return;
  const uint32 k = unit * UNIT, inner = params.units * UNIT;

  // Phase 2: its codes, and its block's numbers.
  uint32 word[kBytes / 4];
  const FORMAT::Code* unit_g = codes_g + (static_cast<int64>(row) * inner + k) * FORMAT::kBits / 8;
#pragma unroll
  for (int piece = 0; piece < kBytes / kPiece; piece++) {
    using Loaded = typename Word<kPiece>::Type;
    const Loaded loaded = reinterpret_cast<const Loaded*>(unit_g)[piece];
    memcpy(word + piece * (kPiece / 4), &loaded, kPiece);
  }
  const uint32 blocks = inner / params.block_size, supers = inner / max(FORMAT::kSuperBlock, 1);
  const int64 block = static_cast<int64>(row) * blocks + k / params.block_size;
  const int64 super_block = static_cast<int64>(row) * supers + k / max(FORMAT::kSuperBlock, 1);
  const BlockNumbers numbers = block_numbers<FORMAT>(scales_g, super_scales_g, block, super_block);

  // Phase 3: the weights.
  DTYPE* target = out_g + row * params.outer_stride + k * params.inner_stride;
#pragma unroll
  for (int first = 0; first < UNIT; first += kStored) {
    float w[kStored];
#pragma unroll
    for (int i = 0; i < kStored; i++) w[i] = weight_of<FORMAT>(number(word, first + i, codebook_s), numbers);
    if constexpr (VEC > 1) {
      store_vec<kStored>(target + first, w);
    } else {
#pragma unroll
      for (int i = 0; i < kStored; i++) target[(first + i) * params.inner_stride] = from_float<DTYPE>(w[i]);
    }
  }
}
