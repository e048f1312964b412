// Probe of tile.cuh: one CTA loads one tile and writes its shared memory out, row padding included.
#include "common/tile.cuh"

using Probed = Tile<ROWS, COLS, PADDED_COLS, conflict_free_stride(PADDED_COLS)>;

extern "C" __global__ void probe_tile(const DTYPE* rows_g, float* tile_g, long long row_stride, int valid_rows) {
  __shared__ __align__(16) float tile_s[Probed::kItems];
  for (int at = threadIdx.x; at < Probed::kItems; at += THREADS) tile_s[at] = -1.f;  // what nobody writes stays
  __syncthreads();                                                                   // tile_s: filled with -1
  load_tile<Probed, THREADS, VEC>(tile_s, rows_g, row_stride, valid_rows);
  __syncthreads();  // tile_s: loaded
  for (int at = threadIdx.x; at < Probed::kItems; at += THREADS) tile_g[at] = tile_s[at];
}
