// The number of float32 multiply-adds that a GPU makes: the ceiling of kernels whose products are float32 arithmetic.
//
// Shapes    sums (CTAs, THREADS) float32: of each thread kInFlight chains of s <- s x + x, ROUNDS long, from s = 0.
// Work      each thread has IN_FLIGHT chains, which do not wait for each other. A multiply-add reads two different
//           registers, so that it never waits for a bank of the register file; a counter goes with 16 rounds of them.
// Budget    registers: IN_FLIGHT chains; no shared memory.
#if !defined(THREADS) || !defined(IN_FLIGHT) || !defined(ROUNDS)
#error "THREADS, IN_FLIGHT and ROUNDS come from a launch-configuration table"
#endif
constexpr int kInFlight = IN_FLIGHT;
constexpr int kRounds = ROUNDS;

extern "C" __global__ void __launch_bounds__(THREADS) fma_rate(float* sums_g, float x) {
  float s[kInFlight] = {};
#pragma unroll 16
  for (int round = 0; round < kRounds; round++) {
#pragma unroll
    for (int i = 0; i < kInFlight; i++) s[i] = __fmaf_rn(s[i], x, x);
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kInFlight; i++) sum += s[i];
  sums_g[blockIdx.x * THREADS + threadIdx.x] = sum;
}
