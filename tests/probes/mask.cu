// Probe of mask.cuh: a thread asks for the keys that one position sees.
#include "common/mask.cuh"

extern "C" __global__ void probe_mask(const long long* positions_g, int* begin_g, int* end_g, int count, long long left,
                                      long long right, int keys) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  const KeyRange range = visible_keys(positions_g[at], left, right, keys);
  begin_g[at] = range.begin;
  end_g[at] = range.end;
}
