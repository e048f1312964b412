// Probe of online_softmax.cuh: a thread folds one row of scores in tiles of TILE, with a weighted sum beside it.
#include "common/online_softmax.cuh"

extern "C" __global__ void probe_online_softmax(const float* scores_g, const float* values_g, float* out_g,
                                                float* lse_g, int rows, int length) {
  const int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  OnlineSoftmax<UNIT> softmax;
  float acc = 0.f;
  for (int first = 0; first < length; first += TILE) {
    const int end = min(first + TILE, length);
    float largest = -kInfinity;
    for (int j = first; j < end; j++) largest = fmaxf(largest, scores_g[row * length + j]);
    acc *= softmax.raise(largest);
    for (int j = first; j < end; j++) {
      const float p = softmax.weight(scores_g[row * length + j]);
      softmax.l += p;
      acc += p * values_g[row * length + j];
    }
  }
  out_g[row] = acc * softmax.normaliser();
  lse_g[row] = softmax.lse();
}
