// Histograms of distances below a row's largest score, and the search for a rank or a fraction of the probability in
// them.
//
// A distance has three digits of 10 bits. A histogram counts the tokens of each value of one digit and adds up their
// weights, in integers: the order of the additions, and which CTA makes them, does not matter.
#pragma once

#include "../common/config.cuh"
#include "logits.cuh"

constexpr int kDigitBits = 10;
constexpr int kBins = 1 << kDigitBits;
static_assert(kDistanceBits == 3 * kDigitBits, "three digits");
constexpr int kLimbBits = 14;  // 2^18 such limbs add up to less than 2^32
constexpr uint32 kLimbMask = (1u << kLimbBits) - 1;
constexpr int kSums = 4;  // a count, and three limbs of a weight below 2^42

__device__ __forceinline__ uint32 first_digit(uint32 distance) { return distance >> (2 * kDigitBits); }

enum Measure { kTokens, kWeights };

struct Sums {
  uint32 count;
  uint64 weight;

  __device__ __forceinline__ Sums operator+(const Sums& other) const {
    return {count + other.count, weight + other.weight};
  }
  __device__ __forceinline__ uint64 of(Measure measure) const { return measure == kWeights ? weight : count; }
};

template <int kThreads>
struct alignas(kVectorBytes) Bins {
  uint32 sum[kSums][kBins];

  static constexpr int kQuads = kSums * kBins / 4;
  static_assert(kQuads % kThreads == 0, "as many for each thread");

  // Call quad(i, sums) for this thread's fours of neighbouring sums.
  template <typename Quad>
  __device__ __forceinline__ void each_quad(Quad quad) {
#pragma unroll
    for (int i = threadIdx.x; i < kQuads; i += kThreads) quad(i, reinterpret_cast<uint4*>(&sum[0][0])[i]);
  }

  // No thread counts until the barrier that follows.
  __device__ __forceinline__ void clear() {
    each_quad([](int, uint4& sums) { sums = {}; });
  }

  __device__ __forceinline__ void copy(const uint32* row_g) {
    each_quad([&](int i, uint4& sums) { sums = reinterpret_cast<const uint4*>(row_g)[i]; });
  }

  // Most are 0.
  __device__ __forceinline__ void add_to(uint32* row_g) {
    each_quad([&](int i, const uint4& sums) {
      if (!(sums.x | sums.y | sums.z | sums.w)) return;
      if (sums.x) atomicAdd(&row_g[4 * i], sums.x);
      if (sums.y) atomicAdd(&row_g[4 * i + 1], sums.y);
      if (sums.z) atomicAdd(&row_g[4 * i + 2], sums.z);
      if (sums.w) atomicAdd(&row_g[4 * i + 3], sums.w);
    });
  }

  __device__ __forceinline__ void count(uint32 bin, uint64 weight) {
    atomicAdd(&sum[0][bin], 1u);
#pragma unroll
    for (int limb = 0; limb < kSums - 1; limb++) {
      const uint32 digits = static_cast<uint32>(weight >> (limb * kLimbBits)) & kLimbMask;
      if (digits) atomicAdd(&sum[1 + limb][bin], digits);  // most weights have one or two
    }
  }

  __device__ __forceinline__ Sums of(int bin) const {
    const uint64 low = sum[1][bin], middle = sum[2][bin], high = sum[3][bin];
    return {sum[0][bin], low + (middle << kLimbBits) + (high << (2 * kLimbBits))};
  }
};

// The bin where a sum is reached, the sums before it, and the sums with it.
struct Found {
  uint32 bin;
  Sums before, through;
};

// The sums before each bin; each thread has kBins / kThreads neighbouring bins.
template <int kThreads>
struct BinScan {
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kEach = kBins / kThreads;
  static_assert(kBins % kThreads == 0 && kWarps <= kWarpSize, "whole bins");

  struct Shared {
    Sums of_warp[kWarps];
    Found found;
  };

  Sums before, own[kEach], total;

  // All threads of the CTA take part; bins_s is written, and a barrier lies between. shared_s.of_warp belongs to the
  // scan until the next barrier.
  __device__ __forceinline__ void scan(const Bins<kThreads>& bins_s, Shared& shared_s) {
    Sums sum = {0, 0};
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      own[i] = bins_s.of(threadIdx.x * kEach + i);
      sum = sum + own[i];
    }
    Sums through = sum;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const Sums other = {__shfl_up_sync(kFullWarp, through.count, distance),
                          __shfl_up_sync(kFullWarp, through.weight, distance)};
      if (lane_index() >= distance) through = through + other;
    }
    if (lane_index() == kWarpSize - 1) shared_s.of_warp[warp_index()] = through;
    __syncthreads();  // shared_s.of_warp: written by every warp
    before = {through.count - sum.count, through.weight - sum.weight};
    total = {0, 0};
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) {
      if (warp < warp_index()) before = before + shared_s.of_warp[warp];
      total = total + shared_s.of_warp[warp];
    }
  }

  // The first bin with which the measure is `wanted`, 1 to the total, or more.
  __device__ __forceinline__ Found find(Measure measure, uint64 wanted, Shared& shared_s) const {
    __syncthreads();  // shared_s.found: the previous one has been read
    Sums reached = before;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const Sums through = reached + own[i];
      if (reached.of(measure) < wanted && wanted <= through.of(measure)) {
        shared_s.found = {static_cast<uint32>(threadIdx.x * kEach + i), reached, through};
      }
      reached = through;
    }
    __syncthreads();  // shared_s.found: written by the one thread that has the bin
    return shared_s.found;
  }
};
