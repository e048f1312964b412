// Probe of the order of CTAs: each writes which tile of which head it has, of query rows and of keys.
#include "attention/backward_params.cuh"

extern "C" __global__ void probe_grid_order(int* rows_g, int* keys_g, const BackwardParams params) {
  const AttentionParams& attention = params.attention;
  const TileCoordinates rows = coordinates_of_cta(attention, TILE, /*last_rows_first=*/true);
  if (blockIdx.x < attention.heads * params.batch * div_up(attention.sq, TILE)) {
    rows_g[2 * blockIdx.x] = rows.batch * attention.heads + rows.head;
    rows_g[2 * blockIdx.x + 1] = rows.first_row;
  }
  const KeyTileCoordinates keys(attention, TILE);
  const int kv_heads = attention.heads / attention.group;
  if (blockIdx.x < kv_heads * params.batch * div_up(attention.sk, TILE)) {
    keys_g[2 * blockIdx.x] = keys.batch * kv_heads + keys.kv_head;
    keys_g[2 * blockIdx.x + 1] = keys.first_key;
  }
}
