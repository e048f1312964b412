// The tiles of a block mask as one kernel walks them: several of 16 by 16 scores make a tile of that kernel.
//
// A CTA of that kernel owns a tile of query rows and walks tiles of keys; with OF_KEYS it is the other way round.
//
// Shapes    tiles (matrices, rows, columns) as block_mask.cu writes them; bits as block_bits.cuh says.
// Work      a warp makes two words, of 32 walked tiles, each lane one of these; grid ceil(words / warps of a CTA).
// Budget    registers; no shared memory.
// Edges     what lies behind the last tile of 16 does not count; walked tiles that do not exist are not seen.
#if !defined(THREADS) || !defined(OF_KEYS)
#error "THREADS and OF_KEYS come from a launch-configuration table"
#endif
#include "block_bits.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_block_bits(const unsigned char* tiles_g, uint32* bits_g, int64 matrices, int rows, int columns,
                         int own_span, int walked_span) {
  // Phase 1: the lane's tile, in tiles of 16 along both axes.
  const int owned = OF_KEYS ? columns : rows, walked = OF_KEYS ? rows : columns;
  const int own_tiles = div_up(owned, own_span), words = div_up(div_up(walked, walked_span), 32);
  const int64 number = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  const int64 owner = number / words, matrix = owner / own_tiles;
  if (matrix >= matrices) return;  // the whole warp
  const int word = static_cast<int>(number % words);
  const int own = static_cast<int>(owner % own_tiles) * own_span, at = (word * 32 + lane_index()) * walked_span;
  const int own_end = min(own + own_span, owned), walked_end = min(at + walked_span, walked);

  // Phase 2: what its tiles of 16 have in common.
  const unsigned char* matrix_g = tiles_g + matrix * rows * columns;
  bool some = false, all = true;
  for (int i = own; i < own_end; i++) {
    for (int j = at; j < walked_end; j++) {
      const int state = matrix_g[OF_KEYS ? static_cast<int64>(j) * columns + i : static_cast<int64>(i) * columns + j];
      some = some || state != 0;
      all = all && state == 2;
    }
  }
  const uint32 seen = __ballot_sync(kFullWarp, some), full = __ballot_sync(kFullWarp, some && all);
  if (lane_index() == 0) {
    bits_g[owner * (2 * words) + word] = seen;
    bits_g[owner * (2 * words) + words + word] = full;
  }
}
