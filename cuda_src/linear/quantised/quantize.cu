// The codes and scales (formats.cuh) of a weight w (K, N).
//
// All arithmetic is float32. low and high are the smallest and the largest of a block's weights and 0; absmax is the
// larger of -low and high:
//
//   Nf4    scale = absmax;                 q = the number of thresholds below x / absmax: these are the means of
//                                          neighbours in the codebook, rounded to float32
//   Int8   scale = absmax / 127;           q = round(x / scale)
//   Int4   scale = float16((high - low) / 15), zero = round(-low / scale), at most 15;
//                                          q = round(x / scale) + zero, within 0 to 15
//
// Quotients are correctly rounded, and round() is to nearest even. Nf4 has the codes of bitsandbytes, whose kernels
// compare x * (1 / absmax) with the same thresholds. For weights in float16 and bfloat16 all codes are equal, which was
// checked for every pair of significands; for float32 all but those whose quotient is within two units of a threshold.
//
// Shapes    w with any strides; codes (N, K * kBits / 8) and scales (N, K / block_size) in C order.
// Work      LANES lanes share a block, each of them 8 neighbouring weights at a time, in two passes: extent, codes.
//           LANES is 1 if w is not contiguous along K, so that neighbouring lanes read neighbouring columns, and
//           otherwise 4 to 32. Grid ceil(N * K / block_size * LANES / THREADS).
// Budget    registers for 8 weights; no shared memory. The second pass reads from L1.
// Edges     subnormal numbers are 0. A block of zeros has scale 0 and the codes of 0. A block with NaN or an infinity
//           has scale NaN, and codes of 0, so that all of it is NaN. So is an Int4 block whose scale exceeds float16,
//           which is then an infinity.
#if !defined(FORMAT) || !defined(DTYPE) || !defined(THREADS) || !defined(LANES) || !defined(VEC)
#error "FORMAT, DTYPE, THREADS, LANES and VEC come from a launch-configuration table"
#endif
#include "../../common/reduce.cuh"
#include "../../common/vec.cuh"
#include "formats.cuh"

// Field for field QUANTIZE_PARAMS of cupyattn/ops/linear/kernels_quantised.py. Strides are in items.
struct QuantizeParams {
  int64 inner_stride, outer_stride;
  uint32 outer;       // N
  uint32 blocks;      // of a row
  uint32 block_size;  // in weights
};
static_assert(sizeof(QuantizeParams) == QUANTIZE_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kUnit = 8;  // weights
static_assert(LANES >= 1 && LANES <= kWarpSize && (LANES & (LANES - 1)) == 0, "lanes of one warp");
static_assert(VEC == 1 || VEC * sizeof(DTYPE) == kVectorBytes, "single items or whole vectors");

struct Min {
  __device__ __forceinline__ float operator()(float a, float b) const { return fminf(a, b); }
};

// The extent of a block, from which its scale follows.
struct Extent {
  float low = 0.f, high = 0.f;
  float nan = 0.f;  // NaN if a weight is not finite

  __device__ __forceinline__ void add(float x) {
    low = fminf(low, x + 0.f);  // which has no -0, and nothing subnormal
    high = fmaxf(high, x + 0.f);
    nan = __fmaf_rn(x, 0.f, nan);
  }
  __device__ __forceinline__ void reduce() {
    low = warp_reduce<Min, LANES>(low);
    high = warp_reduce<Max, LANES>(high);
    nan = warp_reduce<Sum, LANES>(nan);
  }
  __device__ __forceinline__ float absmax() const { return fmaxf(high, 0.f - low); }
};

// x / divisor; 0 unless the divisor is greater than 0.
__device__ __forceinline__ float quotient_or_zero(float x, float divisor) {
  return divisor > 0.f ? __fdiv_rn(x, divisor) : 0.f;
}

// The code of x among kCount codes from kFirst on.
template <int kFirst = 0, int kCount = kCodes>
__device__ __forceinline__ int nearest_code(float x) {
  if constexpr (kCount == 1) {
    return kFirst;
  } else {
    constexpr int kMiddle = kFirst + kCount / 2;
    constexpr float kThreshold = (kNf4Codebook[kMiddle - 1] + kNf4Codebook[kMiddle]) * 0.5f;
    return x > kThreshold ? nearest_code<kMiddle, kCount / 2>(x) : nearest_code<kFirst, kCount / 2>(x);
  }
}

template <typename Format>
struct Quantiser;

template <>
struct Quantiser<Nf4> {
  float absmax;
  __device__ __forceinline__ explicit Quantiser(const Extent& block) : absmax(block.absmax() + block.nan) {}
  __device__ __forceinline__ int code(float x) const { return nearest_code(quotient_or_zero(x, absmax)); }
  __device__ __forceinline__ void store(float* scales_g) const { *scales_g = absmax; }
};

template <>
struct Quantiser<Int8> {
  static constexpr float kLargest = 127.f;
  float scale;
  __device__ __forceinline__ explicit Quantiser(const Extent& block)
      : scale(__fdiv_rn(block.absmax(), kLargest) + block.nan) {}
  __device__ __forceinline__ int code(float x) const { return __float2int_rn(quotient_or_zero(x, scale)); }
  __device__ __forceinline__ void store(float* scales_g) const { *scales_g = scale; }
};

template <>
struct Quantiser<Int4> {
  static constexpr float kMost = 15.f;
  float16 stored;
  float scale, zero;
  __device__ __forceinline__ explicit Quantiser(const Extent& block)
      : stored(from_float<float16>(__fdiv_rn(block.high - block.low, kMost) + block.nan)),
        scale(to_float(stored)),
        zero(fminf(rintf(quotient_or_zero(0.f - block.low, scale)), kMost)) {}
  __device__ __forceinline__ int code(float x) const {
    return __float2int_rn(fminf(fmaxf(rintf(quotient_or_zero(x, scale)) + zero, 0.f), kMost));
  }
  __device__ __forceinline__ void store(float16* scales_g) const {
    scales_g[0] = stored;
    scales_g[1] = from_float<float16>(zero);
  }
};

__device__ __forceinline__ void load_unit(float (&x)[kUnit], const DTYPE* source, int64 stride) {
  if constexpr (VEC > 1) {
    load_vec<kUnit>(x, source);
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; i++) x[i] = to_float(source[i * stride]);
  }
}

// kUnit codes in the order of formats.cuh.
template <typename Format>
__device__ __forceinline__ void store_unit(typename Format::Code* target, const Quantiser<Format>& quantiser,
                                           const float (&x)[kUnit]) {
  constexpr int kWords = kUnit * Format::kBits / 32;
  constexpr uint32 kMask = (1u << Format::kBits) - 1;
  uint32 word[kWords] = {};
#pragma unroll
  for (int i = 0; i < kUnit; i++) {
    const int bit = (Format::kEvenHigh ? i ^ 1 : i) * Format::kBits;
    word[bit / 32] |= (static_cast<uint32>(quantiser.code(x[i])) & kMask) << bit % 32;
  }
  if constexpr (kWords == 2) {
    st_global_v2(target, make_uint2(word[0], word[1]));
  } else {
    *reinterpret_cast<uint32*>(target) = word[0];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize(const DTYPE* __restrict__ w_g, FORMAT::Code* __restrict__ codes_g, FORMAT::Scale* __restrict__ scales_g,
             const QuantizeParams params) {
  // Phase 1: the block of these lanes. Lanes without one take part in the reductions.
  const uint32 thread = blockIdx.x * static_cast<uint32>(THREADS) + threadIdx.x;
  const uint32 group = thread / LANES, lane = thread % LANES;
  const uint32 across = LANES == 1 ? params.outer : params.blocks;  // neighbouring groups' columns, or blocks of one
  const uint32 quotient = group / across, remainder = group - quotient * across;
  const uint32 column = LANES == 1 ? remainder : quotient, block = LANES == 1 ? quotient : remainder;
  const bool exists = column < params.outer && block < params.blocks;
  const uint32 begin = exists ? lane * kUnit : params.block_size;
  const int64 first = static_cast<int64>(block) * params.block_size;  // weight of the row
  const DTYPE* block_g = w_g + column * params.outer_stride + first * params.inner_stride;

  // Phase 2: its extent.
  Extent extent;
  for (uint32 k = begin; k < params.block_size; k += LANES * kUnit) {
    float x[kUnit];
    load_unit(x, block_g + k * params.inner_stride, params.inner_stride);
#pragma unroll
    for (int i = 0; i < kUnit; i++) extent.add(x[i]);
  }
  extent.reduce();
  if (!exists) return;

  // Phase 3: its scale, and the codes.
  const Quantiser<FORMAT> quantiser(extent);
  const int64 number = static_cast<int64>(column) * params.blocks + block;
  if (lane == 0) quantiser.store(scales_g + number * FORMAT::kNumbers);
  FORMAT::Code* row_g = codes_g + number * params.block_size * FORMAT::kBits / 8;
  for (uint32 k = begin; k < params.block_size; k += LANES * kUnit) {
    float x[kUnit];
    load_unit(x, block_g + k * params.inner_stride, params.inner_stride);
    store_unit<FORMAT>(row_g + k * FORMAT::kBits / 8, quantiser, x);
  }
}
