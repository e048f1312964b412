// Reads an array and does nothing with it: the time that any kernel takes which needs all of a weight.
//
// Shapes    words of 16 bytes.
// Work      a thread has IN_FLIGHT loads on their way; all CTAs advance through the array at the same pace.
// Budget    registers: IN_FLIGHT words; no shared memory.
// Edges     words beyond the array are not read. A thread writes only if what it read XORs to a number that random
//           weights do not: so the compiler cannot leave the reads out.
#if !defined(THREADS) || !defined(IN_FLIGHT)
#error "THREADS and IN_FLIGHT come from a launch-configuration table"
#endif
#include "../common/memory.cuh"

constexpr int kInFlight = IN_FLIGHT;

extern "C" __global__ void __launch_bounds__(THREADS)
    read_weight(const uint4* __restrict__ words, uint32* __restrict__ sink, int64 count) {
  const int64 step = int64{gridDim.x} * THREADS;
  uint32 all = 0u;
#pragma unroll 1
  for (int64 first = blockIdx.x * int64{THREADS} + threadIdx.x; first < count; first += kInFlight * step) {
    uint4 word[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      word[i] = first + i * step < count ? ld_global_v4(static_cast<const void*>(words + first + i * step))
                                         : make_uint4(0u, 0u, 0u, 0u);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++) all ^= word[i].x ^ word[i].y ^ word[i].z ^ word[i].w;
  }
  if (all == 0x9e3779b9u) *sink = all;
}
