// Probe of the order of packed sequences' CTAs, each a warp: which tile of which head of which sequence it has.
#include "attention/packed_rows.cuh"

extern "C" __global__ void probe_packed_order(const int* cu_seqlens_g, int* found_g, int batch, int total, int longest,
                                              int heads, int together) {
  const PackedRows rows = {cu_seqlens_g, {/*stride=*/1, /*is_int64=*/0}, batch, total, longest};
  const PackedTile tile = rows.of_cta(heads, together, TILE, rows.lane_tiles(0, TILE));
  if (lane_index() != 0) return;
  reinterpret_cast<int4*>(found_g)[blockIdx.x] = make_int4(tile.batch, tile.head, tile.tile, tile.tiles);
}
