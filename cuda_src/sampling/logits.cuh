// Code of all kernels of sampling: a part of a row with its scores, and the arithmetic that the reference repeats.
//
// A row of logits is cut into parts of PART tokens, a CTA (cooperative thread array, a block of threads) each. All
// arithmetic that decides a draw is exact, or consists of single multiplications, additions and divisions that the
// compiler must not fuse (__fmul_rn etc.). So NumPy gives the same bits (cupyattn/ops/sampling/reference.py).
#pragma once

#include "../common/philox.cuh"
#include "../common/reduce.cuh"
#include "../common/vec.cuh"

constexpr float kLeastTemperature = 1e-6f;  // a row with a lower temperature is greedy
constexpr float kLargestFinite = 0x1.fffffep+127f, kLeastNormal = 0x1p-126f;
constexpr int kNoToken = 0x7fffffff;  // larger than every token
// A distance below the largest score is in units of 2^-24 and less than 2^30: up to 64 factors of 2. Noise is from
// -5 to 31.5, so a token more than 37 below the largest is never drawn.
constexpr int kDistanceBits = 30, kFractionBits = 24;

// Field for field the structured dtype SAMPLE_PARAMS of cupyattn/ops/sampling/kernels. Strides are in items.
struct SampleParams {
  int64 logits_stride, previous_stride, previous_step;
  int64 seed_stride, step_stride, temperature_stride, top_k_stride, top_p_stride, min_p_stride,
      repetition_penalty_stride;
  int32 vocabulary, width, parts;  // tokens, columns of previous, parts of a row
  int32 step_is_int64, top_k_is_int64;
};
static_assert(sizeof(SampleParams) == SAMPLE_PARAMS_BYTES, "its dtype in Python describes another struct");

// An option of a row: an array's item, or the number of all rows.
template <typename T>
__device__ __forceinline__ T option(const T* array_g, int64 stride, T value, int64 row) {
  return array_g ? array_g[row * stride] : value;
}

__device__ __forceinline__ int64 integer_option(const void* array_g, int64 stride, bool is_int64, int64 value,
                                                int64 row) {
  if (!array_g) return value;
  return is_int64 ? static_cast<const int64*>(array_g)[row * stride] : static_cast<const int*>(array_g)[row * stride];
}

template <typename Scalar_, int kThreads_, int kTokens_, bool kAligned_, bool kPenalised_>
struct PartTraits {
  using Scalar = Scalar_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kTokens = kTokens_;                       // of a part
  static constexpr bool kAligned = kAligned_;                    // rows start at multiples of a vector's size
  static constexpr bool kPenalised = kPenalised_;                // there are previous tokens
  static constexpr int kItems = kVectorBytes / sizeof(Scalar);   // neighbours that a thread owns
  static constexpr int kGroups = kTokens / (kThreads * kItems);  // such groups of a thread
  static_assert(kTokens % (kThreads * kItems) == 0, "whole groups");
  static_assert(kItems % 4 == 0, "a call of Philox serves four neighbours");
};

// The previous tokens of a part, a bit each.
template <typename Part>
struct Previous {
  uint32 bits[Part::kPenalised ? Part::kTokens / 32 : 1];

  // All threads of the CTA take part.
  __device__ __forceinline__ void gather(const int* previous_g, const SampleParams& params, int64 row, int first) {
    if constexpr (Part::kPenalised) {
      for (int word = threadIdx.x; word < Part::kTokens / 32; word += Part::kThreads) bits[word] = 0;
      __syncthreads();  // bits: zero
      for (int i = threadIdx.x; i < params.width; i += Part::kThreads) {
        const uint32 token = previous_g[row * params.previous_stride + i * params.previous_step];
        const uint32 place = token - first;  // beyond the last for -1 and for tokens of other parts
        if (place < Part::kTokens) atomicOr(&bits[place / 32], 1u << place % 32);
      }
      __syncthreads();  // bits: every thread has set its own
    }
  }

  // The logit x of the part's token `place`; -inf for NaN.
  __device__ __forceinline__ float weakened(float x, int place, float penalty) const {
    if (Part::kPenalised && (bits[place / 32] >> place % 32 & 1u)) {
      x = x > 0.f ? __fdiv_rn(x, penalty) : __fmul_rn(x, penalty);
    }
    return x == x ? x : -kInfinity;
  }
};

// A thread's logits of a part, not converted: all loads are in flight before the first is used.
template <typename Part>
struct PartLogits {
  using Items = Vec<typename Part::Scalar, Part::kItems>;
  Items items[Part::kGroups];

  // `first` is the part's first token. Items after the last token are NaN, which is no token.
  __device__ __forceinline__ void load(const typename Part::Scalar* row_g, int first, int vocabulary) {
#pragma unroll
    for (int group = 0; group < Part::kGroups; group++) {
      const int token = first + (group * Part::kThreads + threadIdx.x) * Part::kItems;
      if (Part::kAligned && token + Part::kItems <= vocabulary) {
        *reinterpret_cast<uint4*>(&items[group]) = *reinterpret_cast<const uint4*>(row_g + token);
      } else {
#pragma unroll
        for (int i = 0; i < Part::kItems; i++) {
          items[group].item[i] = token + i < vocabulary ? row_g[token + i] : from_float<typename Part::Scalar>(kNaN);
        }
      }
    }
  }

  // Call take(place, x) for each group of neighbours: the place of the first in the part, and their logits, those of
  // previous tokens weakened, -inf where there is none. One body for all groups keeps registers few: the next group
  // moves to where the last one was.
  template <typename Take>
  __device__ __forceinline__ void each_group(const Previous<Part>& previous_s, float penalty, Take take) {
#pragma unroll 1
    for (int group = 0; group < Part::kGroups; group++) {
      const int place = (group * Part::kThreads + threadIdx.x) * Part::kItems;
      float x[Part::kItems];
#pragma unroll
      for (int i = 0; i < Part::kItems; i++) {
        x[i] = previous_s.weakened(to_float(items[0].item[i]), place + i, penalty);
      }
      take(place, x);
#pragma unroll
      for (int next = 1; next < Part::kGroups; next++) items[next - 1] = items[next];
    }
  }
};

// log2(1 + t) = t P(t) for 1 + t from sqrt(1/2) to sqrt(2), with a relative error of 2e-7: a minimax polynomial.
__device__ __forceinline__ float log2_near_one(float t) {
  constexpr float kP[] = {0x1.715474p+0f, -0x1.715528p-1f, 0x1.ec7724p-2f, -0x1.70e2a8p-2f,
                          0x1.25fd34p-2f, -0x1.fdb328p-3f, 0x1.df5196p-3f, -0x1.2a9f48p-3f};
  float p = kP[7];
#pragma unroll
  for (int i = 6; i >= 0; i--) p = __fadd_rn(__fmul_rn(p, t), kP[i]);
  return __fmul_rn(p, t);
}

// log2 of a positive number that is not subnormal.
__device__ __forceinline__ float log2_of(float x) {
  constexpr uint32 kRootHalf = 0x3f3504f3u;
  const uint32 bits = __float_as_uint(x);
  const int exponent = static_cast<int>(bits - kRootHalf) >> 23;
  const float t = __fsub_rn(__uint_as_float(bits - (static_cast<uint32>(exponent) << 23)), 1.f);
  return __fadd_rn(__int2float_rn(exponent), log2_near_one(t));
}

// Gumbel noise in base 2, -log2(-log2 u), of u = (word | 1) / 2^32: from -5 to 31.5.
__device__ __forceinline__ float gumbel_log2(uint32 word) {
  constexpr uint32 kRootTwo = 0xb504f334u;  // the first integer above sqrt(2) 2^31
  const int zeros = __clz(word | 1u);
  const uint32 m = (word | 1u) << zeros;
  const bool upper = m >= kRootTwo;  // u = 2^-zeros (1 + t), otherwise 2^(-zeros - 1) (1 + t)
  const float t = upper ? __fmul_rn(__int2float_rn(static_cast<int>(m)), 0x1p-32f)
                        : __fmul_rn(__int2float_rn(static_cast<int>(m - 0x80000000u)), 0x1p-31f);
  return -log2_of(-__fadd_rn(__int2float_rn(upper ? -zeros : -zeros - 1), log2_near_one(t)));
}

// The random words of tokens 4 g to 4 g + 3 in a step. Dropout never uses this word 3 of the counter.
__device__ __forceinline__ Philox4 token_words(uint64 seed, uint64 step, int group) {
  constexpr uint32 kSampling = 0x80000001u;
  const Philox4 counter = {
      {static_cast<uint32>(group), static_cast<uint32>(step), static_cast<uint32>(step >> 32), kSampling}};
  return philox4x32_10(counter, static_cast<uint32>(seed), static_cast<uint32>(seed >> 32));
}

__device__ __forceinline__ float token_gumbel(uint64 seed, uint64 step, int token) {
  const Philox4 words = token_words(seed, step, token / 4);
  // Selected, not indexed: registers have no index.
  const uint32 low = token % 2 == 0 ? words.word[0] : words.word[1];
  const uint32 high = token % 2 == 0 ? words.word[2] : words.word[3];
  return gumbel_log2(token % 4 < 2 ? low : high);
}

// The factor from differences of logits to scores in base 2; not 0, since a difference may be infinite.
__device__ __forceinline__ float score_scale(float temperature) {
  return fmaxf(__fdiv_rn(kLog2E, temperature), kLeastNormal);
}

// The score of a logit above -inf: 0 for the row's largest, less for others, and inf for inf. The difference comes
// first: near the largest it is exact, however large both are, and keeps the digits of the noise that is added.
__device__ __forceinline__ float score_of(float x, float largest, float scale) {
  return __fmul_rn(__fsub_rn(x, largest), scale);
}

// How far a score is below the largest, in units of 2^-24, at most 2^30 - 1.
__device__ __forceinline__ uint32 distance_of(float score) {
  const float units = fminf(__fmul_rn(-score, 0x1p24f), 0x1p30f);
  return min(__float2uint_rz(units), (1u << kDistanceBits) - 1);
}

// 2^41 2^-distance, an integer: sums of them do not depend on their order.
__device__ __forceinline__ uint64 weight_of(uint32 distance) {
  constexpr float kQ[] = {1.f, -0x1.62e428p-1f, 0x1.ebf53ap-3f, -0x1.c5df54p-5f, 0x1.31f974p-7f, -0x1.063cb2p-10f};
  const float f = __fmul_rn(__uint2float_rn(distance & ((1u << kFractionBits) - 1)), 0x1p-24f);
  float p = kQ[5];
#pragma unroll
  for (int i = 4; i >= 0; i--) p = __fadd_rn(__fmul_rn(p, f), kQ[i]);
  return static_cast<uint64>(__float2uint_rz(__fmul_rn(p, 0x1p24f))) << 17 >> (distance >> kFractionBits);
}

// The filters of a row; numbers out of range count as no filter.
struct RowFilters {
  float temperature, top_p, min_p;
  int64 top_k;

  __device__ __forceinline__ bool greedy() const { return !(temperature >= kLeastTemperature); }
  __device__ __forceinline__ bool has_top_k() const { return top_k > 0; }
  __device__ __forceinline__ bool has_top_p() const { return top_p < 1.f; }
  __device__ __forceinline__ bool cuts() const { return !greedy() && (has_top_k() || has_top_p()); }

  // min-p: the largest distance with 2^-distance >= min_p, plus 2^-18 as for top-p.
  __device__ __forceinline__ uint32 farthest() const {
    if (!(min_p > 0.f)) return ~0u;
    return __float2uint_rz(fminf(__fmul_rn(-log2_of(min_p), 0x1p24f), 0x1p30f)) + (1u << (kFractionBits - 18));
  }
  // top-p: the fraction of a sum of weights that the kept tokens reach: top_p (1 - 2^-18). The difference is larger
  // than the rounding errors of top_p and of the weights of tokens that add up to it.
  __device__ __forceinline__ uint64 share(uint64 weight) const {
    constexpr float kReached = 0x1.ffff8p+63f;  // 2^64 (1 - 2^-18)
    const uint64 wanted = __umul64hi(weight, __float2ull_rz(__fmul_rn(fmaxf(top_p, 0.f), kReached)));
    return wanted > 0 ? wanted : 1;
  }
};

// The largest logit of a row, or the largest finite number if that is inf, from the maxima of its parts. All threads of
// the CTA take part.
template <int kThreads>
__device__ __forceinline__ float largest_logit(const float* maxima_g, int parts, float* partial_s) {
  float largest = -kInfinity;
  for (int part = threadIdx.x; part < parts; part += kThreads) largest = fmaxf(largest, maxima_g[part]);
  return fminf(cta_reduce<Max, kThreads>(largest, partial_s), kLargestFinite);
}
