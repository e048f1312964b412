// The gradient of an embedding's table, third step: sums over runs of equal rows, in chunks of the sorted tokens.
//
//   dtable_r = sum over tokens t with ids_t = r of dout_t   (+ the previous contents, with ACCUMULATE)
//
// A run within one chunk is the whole sum of its row and is written. For a run that crosses the ends of chunks, each
// chunk leaves its part in partials for combine.cu: in [chunk][0] if the run began before the chunk, in [chunk][1] if
// it begins in the chunk. The order of all additions is fixed. Each token takes the same work, however frequent its row
// is.
//
// Shapes    dout (*ids.shape, length) of any outer strides (elements.cuh, a row for each token); order and rows (T,) of
//           sort.cu; dtable (table_rows, length), rows table_stride items apart; partials (chunks, 2, length)
//           float32.
// Work      a warp owns CHUNK sorted tokens and 32 * VEC columns, one vector a lane; params.units column blocks; grid
//           ceil(chunks * column blocks / warps of a CTA).
// Budget    registers: VEC floats and kInFlight * VEC storage items, below 80 in all; no shared memory.
// Edges     ids that are not rows are last in the order, as row table_rows, and are left out.
#if !defined(DTYPE) || !defined(THREADS) || !defined(VEC) || !defined(CHUNK) || !defined(ACCUMULATE)
#error "DTYPE, THREADS, VEC, CHUNK and ACCUMULATE come from a launch-configuration table"
#endif
#include "../common/elements.cuh"

using Params = ElementsParams<1>;
static_assert(sizeof(Params) == ELEMENTS_PARAMS_BYTES, "its dtype in Python describes another struct");
constexpr int kInFlight = 4;  // rows of dout that are loaded at a time
static_assert(CHUNK == kWarpSize && CHUNK % kInFlight == 0, "a lane knows one token of the chunk");

extern "C" __global__ void __launch_bounds__(THREADS)
    embedding_backward(const DTYPE* dout_g, const int* order_g, const int* rows_g, DTYPE* dtable_g, float* partials_g,
                       int table_rows, int64 table_stride, const Params params) {
  const uint32 warp = blockIdx.x * static_cast<uint32>(THREADS / kWarpSize) + warp_index();
  const uint32 chunk = warp / params.units;
  const int64 column = static_cast<int64>(warp - chunk * params.units) * (kWarpSize * VEC) + lane_index() * VEC;
  const int count = static_cast<int>(params.rows), first = static_cast<int>(chunk) * CHUNK;
  if (first >= count) return;  // the whole warp
  const bool exists = column < params.length;

  // Phase 1: the lane's token and its row; the rows next to the chunk. Missing tokens have no row.
  const int mine = first + lane_index();
  const int row = mine < count ? rows_g[mine] : table_rows;
  const int before = first > 0 ? rows_g[first - 1] : -1;
  const int after_chunk = first + CHUNK < count ? rows_g[first + CHUNK] : -1;
  const int64 offset = row < table_rows ? OuterCoordinates<1>(params, order_g[mine]).offset(params, 0) : 0;
  float* partial_g = partials_g + static_cast<int64>(chunk) * 2 * params.length + column;

  // Phase 2: the sums of runs, in order.
  float sum[VEC] = {};
  bool began_here = __shfl_sync(kFullWarp, row, 0) != before;
  for (int start = 0; start < CHUNK; start += kInFlight) {
    Vec<DTYPE, VEC> loaded[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; k++) {
      loaded[k] = {};
      const int64 token_offset = __shfl_sync(kFullWarp, offset, start + k);
      const bool of_table = __shfl_sync(kFullWarp, row, start + k) < table_rows;
      if (exists && of_table) loaded[k] = *reinterpret_cast<const Vec<DTYPE, VEC>*>(dout_g + token_offset + column);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; k++) {
      const int at = start + k, current = __shfl_sync(kFullWarp, row, at);
      const int later = __shfl_sync(kFullWarp, row, at + 1 < CHUNK ? at + 1 : at);
      const int next = at + 1 < CHUNK ? later : after_chunk;
      if (current >= table_rows) continue;  // the same in all lanes
#pragma unroll
      for (int i = 0; i < VEC; i++) sum[i] += to_float(loaded[k].item[i]);
      const bool goes_on = next == current;
      if (goes_on && at + 1 < CHUNK) continue;
      if (exists && began_here && !goes_on) {
        DTYPE* target_g = dtable_g + current * table_stride + column;
        if constexpr (ACCUMULATE) {
          float present[VEC];
          load_vec(present, target_g);
#pragma unroll
          for (int i = 0; i < VEC; i++) sum[i] += present[i];
        }
        store_vec(target_g, sum);
      } else if (exists) {
        store_vec(partial_g + (began_here ? params.length : 0), sum);
      }
      began_here = true;
#pragma unroll
      for (int i = 0; i < VEC; i++) sum[i] = 0.f;
    }
  }
}
