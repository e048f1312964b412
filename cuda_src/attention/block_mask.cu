// The tiles of the scores that a mask_mod leaves: the expression is evaluated once for every score.
//
//   tiles[b][h][i][j] = 0, 1 or 2: no, some or all scores of queries 16 i to 16 i + 15 and keys 16 j to 16 j + 15 are
//   seen
//
// Shapes    tiles (B, H, ceil(Sq / 16), ceil(Sk / 16)) of bytes, contiguous.
// Tiles     TILE * TILE scores a warp; its lanes are 2 queries by 16 keys, so that an array of keys is read in runs.
// Grid      ceil(tiles / warps of a CTA) CTAs.
// Budget    registers: what the expression needs; no shared memory.
// Edges     scores beyond Sq and Sk do not count, nor is the expression evaluated for them.
#if !defined(THREADS) || !defined(TILE) || !defined(MODIFIED)
#error "THREADS, TILE and MODIFIED come from a launch-configuration table"
#endif
#include "modifiers.cuh"

static_assert(TILE == 16 && kWarpSize % TILE == 0, "lanes are whole rows of a tile");

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_block_mask(unsigned char* tiles_g MODIFIER_ARRAYS, int64 count, int heads, int sq,
                         int sk MODIFIER_STRIDES) {
  const int64 tile = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  if (tile >= count) return;  // the whole warp
  const Modifiers modifiers = MODIFIERS;
  const int columns = div_up(sk, TILE), rows = div_up(sq, TILE);
  const int64 matrix = tile / columns / rows;
  const int batch = static_cast<int>(matrix / heads), head = static_cast<int>(matrix % heads);
  const int key = static_cast<int>(tile % columns) * TILE + lane_index() % TILE;
  const int first_row = static_cast<int>(tile / columns % rows) * TILE + lane_index() / TILE;
  bool some = false, all = true;
#pragma unroll 1
  for (int row = first_row; row < min(first_row + TILE, sq); row += kWarpSize / TILE) {
    if (key >= sk) break;
    const bool seen = modifiers.mask(batch, head, row, key);
    some = some || seen;
    all = all && seen;
  }
  some = __any_sync(kFullWarp, some);
  all = __all_sync(kFullWarp, all);
  if (lane_index() == 0) tiles_g[tile] = some ? all ? 2 : 1 : 0;
}
