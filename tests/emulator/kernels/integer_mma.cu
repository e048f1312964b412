// Products of int8 matrices by the wrappers of mma.m8n8k16: fragments through ldmatrix, a warp per CTA.
#include "common/mma.cuh"

constexpr int kWords = 4;  // of 16 bytes in a row: k = 64

// out (16 x 8) = x (16 x 64) times the transpose of y (8 x 64), over the first `steps` k16 steps, by pairs that share y
// and by single products; threads from `count` on stay away.
extern "C" __global__ void product_s8(const uint4* x, const uint4* y, int* by_pairs, int* by_halves, int steps,
                                      int count) {
  __shared__ uint4 tile[24 * kWords];
  const int lane = threadIdx.x;
  for (int i = lane; i < 24 * kWords; i += 32) tile[i] = i < 16 * kWords ? x[i] : y[i - 16 * kWords];
  __syncthreads();
  if (lane >= count) return;
  int pair[4] = {0, 0, 0, 0}, low[2] = {0, 0}, high[2] = {0, 0};
  for (int step = 0; step < steps; step++) {
    uint32 a[2], b[1];
    ldmatrix<2>(a, shared_address(tile + (lane & 15) * kWords + step));
    ldmatrix<1>(b, shared_address(tile + (16 + (lane & 7)) * kWords + step));
    mma_m8n8k16_s8_pair(pair, a, b[0]);  // PAIR
    mma_m8n8k16_s8(low, a[0], b[0]);
    mma_m8n8k16_s8(high, a[1], b[0]);
  }
  for (int i = 0; i < 4; i++) {
    const int at = (lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2;
    by_pairs[at] = pair[i];
    by_halves[at] = i < 2 ? low[i] : high[i - 2];
  }
}
