// The order in which CTAs that own tiles of a block mask start: those with the longest loops first, so that none of
// them is still at work when the others have ended (the longest first, Graham, 1969).
//
// Shapes    lists as in block_lists.cuh; matrices (groups, group): heads of a group share an order, by their sum.
// Work      a warp finds the place of one owned tile among those of its group; grid ceil(tiles of all / warps of a
//           CTA).
// Budget    registers; no shared memory.
// Edges     of tiles with the same work the first comes first, so that each place is taken once.
#if !defined(THREADS)
#error "THREADS comes from a launch-configuration table"
#endif
#include "../common/reduce.cuh"
#include "block_lists.cuh"

constexpr int kPartialCost = 2;  // of a tile that needs a mask, in full ones

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_block_order(uint2* lists_g, int64 groups, int group, int own_tiles, int loop_tiles) {
  const int64 number = static_cast<int64>(blockIdx.x) * (THREADS / kWarpSize) + warp_index();
  if (number >= groups * own_tiles) return;  // the whole warp
  const int own = static_cast<int>(number % own_tiles), list = list_items(loop_tiles);
  uint2* group_g = lists_g + number / own_tiles * group * own_tiles * list;
  const auto work_of = [&](int tile) {
    int work = 0;
    for (int head = 0; head < group; head++) {
      const uint2 counts = group_g[(static_cast<int64>(head) * own_tiles + tile) * list];
      work += static_cast<int>(counts.x) * kPartialCost + static_cast<int>(counts.y);
    }
    return work;
  };

  const int own_work = work_of(own);
  int before = 0;
  for (int tile = lane_index(); tile < own_tiles; tile += kWarpSize) {
    const int work = work_of(tile);
    before += work > own_work || (work == own_work && tile < own);
  }
  before = warp_reduce<Sum>(before);
  if (lane_index() == 0) group_g[static_cast<int64>(before) * list + 1].x = own;
}
