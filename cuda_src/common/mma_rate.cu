// Times mma.m16n8k8: GPUs of compute capability 7.5 without tensor cores execute it too, but slowly. From sm_80 on
// MMA_K = 16 times mma.m16n8k16, which kernels for these GPUs use: an H200 multiplies faster with it.
//
// Shapes    cycles (4,) int64: the cycles of each warp for ROUNDS * IN_FLIGHT products.
// Work      one CTA with a warp for each sub-partition of a multiprocessor: all four are busy, as in a real kernel.
//           IN_FLIGHT products are independent of each other. The clock is that of the multiprocessor, so neither its
//           frequency nor the launch overhead matters.
// Budget    registers: 4 IN_FLIGHT sums; no shared memory.
#if !defined(THREADS) || !defined(IN_FLIGHT) || !defined(ROUNDS) || !defined(MMA_K)
#error "THREADS, IN_FLIGHT, ROUNDS and MMA_K come from a launch-configuration table"
#endif
#include "mma.cuh"

constexpr int kInFlight = IN_FLIGHT;
constexpr int kRounds = ROUNDS;

extern "C" __global__ void __launch_bounds__(THREADS) mma_rate(int64* cycles_g) {
  const uint32 a[2] = {0u, 0u};
  float sums[kInFlight][4] = {};
  const int64 begin = clock64();
#pragma unroll 1
  for (int round = 0; round < kRounds; round++) {
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
#if MMA_K == 16
      mma_m16n8k16(sums[i], a, a, 0u, 0u);
#else
      mma_m16n8k8(sums[i], a, 0u);
#endif
    }
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kInFlight; i++) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  const int64 elapsed = clock64() - begin;
  // The sum is 0; without it the compiler would remove the products.
  if (lane_index() == 0) cycles_g[warp_index()] = elapsed + static_cast<int64>(sum);
}
