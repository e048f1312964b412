// Probe of scores.cuh: how far a thread's query is behind its key, some rows and keys further.
#include "attention/scores.cuh"

extern "C" __global__ void probe_distance(const long long* distances_g, const int* rows_g, const int* keys_g,
                                          float* result_g, int count) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at < count) result_g[at] = Distance(distances_g[at]).plus(rows_g[at], keys_g[at]);
}
