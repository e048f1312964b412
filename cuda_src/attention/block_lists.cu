// The lists of the tiles of a block mask that one kernel loops over: several of 16 by 16 scores make a tile of that
// kernel.
//
// A CTA of that kernel owns a tile of query rows and loops over tiles of keys; with OF_KEYS it is the other way round.
// A tile of its own has parts, one for each warp, and each tile of the loop has a state for each part: whether it sees
// some or all of the tile.
//
// Shapes    tiles (matrices, rows, columns) as block_mask.cu writes them; lists as in block_lists.cuh.
// Work      a CTA makes one list, of THREADS tiles of the loop at a time, each thread one of these; grid one for each
//           list.
// Budget    registers; a word of shared memory for each warp.
// Edges     what lies beyond the last tile of 16 does not count; tiles that do not exist are not seen.
#if !defined(THREADS) || !defined(OF_KEYS)
#error "THREADS and OF_KEYS come from a launch-configuration table"
#endif
#include "block_lists.cuh"

constexpr int kWarps = THREADS / kWarpSize;
constexpr int kCountBits = 16;  // of each of two counts in one word

// The lowest bits of a word, fewer than all.
__device__ __forceinline__ uint32 first_bits(int count) { return (1u << count) - 1u; }
static_assert(THREADS < 1 << kCountBits && kWarps <= kWarpSize, "counts fit their words");

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_block_lists(const unsigned char* tiles_g, uint2* lists_g, int rows, int columns, int own_span,
                          int loop_span, int part_span) {
  __shared__ uint32 counts_s[kWarps];  // partial and full tiles of a warp
  const int owned = OF_KEYS ? columns : rows, loop_extent = OF_KEYS ? rows : columns;
  const int own_tiles = div_up(owned, own_span), loop_tiles = div_up(loop_extent, loop_span);
  const int64 matrix = blockIdx.x / own_tiles;
  const int own = blockIdx.x % own_tiles * own_span, own_end = min(own + own_span, owned);
  const unsigned char* matrix_g = tiles_g + matrix * rows * columns;
  uint2* list_g = lists_g + blockIdx.x * static_cast<int64>(list_items(loop_tiles));

  int partials = 0, fulls = 0;  // listed already
#pragma unroll 1
  for (int first = 0; first < loop_tiles; first += THREADS) {
    // Phase 1: what the tiles of 16 of each part have in common.
    const int tile = first + threadIdx.x, at = tile * loop_span, end = min(at + loop_span, loop_extent);
    uint32 states = 0;
    bool some = false, all = true;
    for (int part = 0; own + part * part_span < own_end; part++) {
      const int part_begin = own + part * part_span, part_end = min(part_begin + part_span, own_end);
      bool some_of_part = false, all_of_part = true;
      for (int i = part_begin; i < part_end; i++) {
        for (int j = at; j < end; j++) {
          const int state =
              matrix_g[OF_KEYS ? static_cast<int64>(j) * columns + i : static_cast<int64>(i) * columns + j];
          some_of_part = some_of_part || state != 0;
          all_of_part = all_of_part && state == 2;
        }
      }
      const uint32 state = !some_of_part ? kEmpty : all_of_part ? kFull : kPartial;
      states |= state << (kStateBits * part);
      some = some || some_of_part;
      all = all && all_of_part;
    }
    some = some && tile < loop_tiles;

    // Phase 2: their positions in the list.
    const uint32 partial = __ballot_sync(kFullWarp, some && !all), full = __ballot_sync(kFullWarp, some && all);
    if (lane_index() == 0) counts_s[warp_index()] = __popc(partial) | __popc(full) << kCountBits;
    __syncthreads();  // counts: written
    const uint32 earlier_lanes = first_bits(lane_index());
    int partial_at = partials + __popc(partial & earlier_lanes), full_at = fulls + __popc(full & earlier_lanes);
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) {
      const int partials_of_warp = counts_s[warp] & first_bits(kCountBits),
                fulls_of_warp = counts_s[warp] >> kCountBits;
      if (warp < warp_index()) partial_at += partials_of_warp, full_at += fulls_of_warp;
      partials += partials_of_warp;
      fulls += fulls_of_warp;
    }
    if (some) list_g[all ? full_item(full_at, loop_tiles) : partial_item(partial_at)] = make_uint2(tile, states);
    __syncthreads();  // counts: read
  }
  if (threadIdx.x == 0) list_g[0] = make_uint2(partials, fulls);
}
