// The gradient of an embedding's table, last step: sums of rows whose tokens are in several chunks.
//
//   dtable_r = partials[c][1] + sum over the chunks k that continue r of partials[k][0]   (+ the previous contents,
//   with ACCUMULATE)
//
// Shapes    as in backward.cu.
// Work      a warp owns the run that begins in a chunk and continues in the next, if there is one, and 32 * VEC
//           columns, one vector a lane; grid ceil(chunks * column blocks / warps of a CTA).
// Budget    registers: VEC floats, below 48 in all; no shared memory.
// Edges     rows that begin and end within a chunk were written before and stay.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(CHUNK) || !defined(ACCUMULATE)
#error "DTYPE, THREADS, VEC, CHUNK and ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/vec.cuh"

// Rows are sorted, so the chunks that continue a row follow `chunk` without gaps; binary search finds the last one.
__device__ __forceinline__ int chunks_that_go_on(const int* rows_g, int count, int row, int chunk) {
  int last = chunk, beyond = (count + CHUNK - 1) / CHUNK;  // last continues the row, or is `chunk`; beyond does not
  while (beyond - last > 1) {
    const int middle = last + (beyond - last) / 2;
    (rows_g[static_cast<int64>(middle) * CHUNK] == row ? last : beyond) = middle;
  }
  return last - chunk;
}

__device__ __forceinline__ void load_part(float (&part)[VEC], const float* source) {
  constexpr int kItems = VEC < 4 ? VEC : 4;
#pragma unroll
  for (int first = 0; first < VEC; first += kItems) {
    float piece[kItems];
    load_vec(piece, source + first);
#pragma unroll
    for (int i = 0; i < kItems; i++) part[first + i] = piece[i];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_combine(const int* rows_g, const float* partials_g, DTYPE* dtable_g, int count, int table_rows,
                      int64 table_stride, int64 length, uint32 column_blocks) {
  const uint32 warp = blockIdx.x * static_cast<uint32>(THREADS / kWarpSize) + warp_index();
  const int chunk = static_cast<int>(warp / column_blocks);
  const int64 column = static_cast<int64>(warp % column_blocks) * (kWarpSize * VEC) + lane_index() * VEC;
  const int64 end = (static_cast<int64>(chunk) + 1) * CHUNK;
  if (end >= count || column >= length) return;
  const int row = rows_g[end - 1];
  const bool begins_here = rows_g[end - CHUNK] != row || chunk == 0 || rows_g[end - CHUNK - 1] != row;
  if (row >= table_rows || rows_g[end] != row || !begins_here) return;

  float sum[VEC];
  DTYPE* target_g = dtable_g + row * table_stride + column;
#pragma unroll
  for (int i = 0; i < VEC; i++) sum[i] = ACCUMULATE ? to_float(target_g[i]) : 0.f;
  const float* parts_g = partials_g + 2 * static_cast<int64>(chunk) * length + column;
#pragma unroll
  for (int i = 0; i < VEC; i++) sum[i] += parts_g[length + i];
  const int more = chunks_that_go_on(rows_g, count, row, chunk);
#pragma unroll 4
  for (int k = 1; k <= more; k++) {
    float part[VEC];
    load_part(part, parts_g + 2 * k * length);
#pragma unroll
    for (int i = 0; i < VEC; i++) sum[i] += part[i];
  }
  store_vec(target_g, sum);
}
