// Times the instructions of one unit, or loads of global memory: what the model of Turing takes from publications.
//
// Shapes    cycles (CTAs * THREADS / 32,) int64: the cycles of each warp. words (COUNT,) of 16 bytes, all of them 0;
//           COUNT is a power of 2.
// Work      a thread has IN_FLIGHT chains of ROUNDS instructions, each of which needs the result of the one before it.
//           A load's address needs it too: one warp shows the latency, many show it under load. Each CTA reads all
//           words in turn, so that they are in L2 and seldom in L1. A warp's reductions add 1 to 32 numbers of its own.
// Budget    registers: IN_FLIGHT chains; no shared memory.
// Edges     the clock is that of the multiprocessor, so neither its frequency nor the launch overhead matters.
#if !defined(THREADS) || !defined(IN_FLIGHT) || !defined(ROUNDS) || !defined(UNIT) || !defined(COUNT)
#error "THREADS, IN_FLIGHT, ROUNDS, UNIT and COUNT come from a launch-configuration table"
#endif
#include "../common/memory.cuh"
#include "../common/mma.cuh"
#include "../common/numeric.cuh"
#include "../common/pack.cuh"

enum Timed { kConversions, kExponentials, kShuffles, kReductions, kProducts, kIntegerProducts, kLoads };

constexpr Timed kUnit = UNIT;
constexpr int kInFlight = IN_FLIGHT;
constexpr int kRounds = ROUNDS;
constexpr uint32 kCount = COUNT;
constexpr uint32 kWarps = THREADS / kWarpSize;

struct Chain {
  uint32 word;
  float sums[4];
  int counts[2];
};

// The next instruction of a chain.
__device__ __forceinline__ void advance(Chain& chain, uint4* words_g) {
  const uint32 a[2] = {0u, 0u};
  if constexpr (kUnit == kConversions) {
    const float x = __uint_as_float(chain.word);
    chain.word = pack_halves(x, x);
  } else if constexpr (kUnit == kExponentials) {
    chain.word = __float_as_uint(ex2_approx(__uint_as_float(chain.word)));
  } else if constexpr (kUnit == kShuffles) {
    chain.word = __shfl_xor_sync(kFullWarp, chain.word, 1);
  } else if constexpr (kUnit == kReductions) {
    red_global_add(reinterpret_cast<float*>(words_g) + chain.word, 1.f);
  } else if constexpr (kUnit == kProducts) {
    mma_m16n8k8(chain.sums, a, 0u);
  } else if constexpr (kUnit == kIntegerProducts) {
    mma_m8n8k16_s8(chain.counts, 0u, 0u);
  } else {
    chain.word = (chain.word + THREADS + ld_global_v4(static_cast<const void*>(words_g + chain.word)).x) % kCount;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) unit_rates(int64* cycles_g, uint4* words_g) {
  Chain chains[kInFlight] = {};
#pragma unroll
  for (uint32 i = 0; i < kInFlight; i++)
    chains[i].word = ((i * gridDim.x + blockIdx.x) * THREADS + threadIdx.x) % kCount;
  const int64 begin = clock64();
#pragma unroll 1
  for (int round = 0; round < kRounds; round++) {
#pragma unroll
    for (int i = 0; i < kInFlight; i++) advance(chains[i], words_g);
  }
  uint32 all = 0u;
#pragma unroll
  for (int i = 0; i < kInFlight; i++) all ^= chains[i].word ^ __float_as_uint(chains[i].sums[0]) ^ chains[i].counts[0];
  const int64 elapsed = clock64() - begin;
  // Without a use of the results the compiler would remove the instructions: add 1 cycle for one of all values.
  if (lane_index() == 0) cycles_g[blockIdx.x * kWarps + warp_index()] = elapsed + (all == 0x9e3u);
}
