// Probe of masks.cuh: a thread asks for the keys that one row sees.
#include "attention/masks.cuh"

extern "C" __global__ void probe_mask(const int* rows_g, int* begin_g, int* end_g, int count, long long q_offset,
                                      long long left, long long right, int keys) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  const KeyRange range = KeyWindow(q_offset, left, right, keys).of_row(rows_g[at]);
  begin_g[at] = range.begin;
  end_g[at] = range.end;
}
