// Parameters of the kernels of many query tokens over a paged cache besides their array pointers, and the queries of a
// CTA has.
//
// Shapes: q and out (B, Sq, H, D), lse (B, H, Sq); or packed, one sequence after the other, (total, H, D) and (H,
// total) with cu_seqlens_q (B + 1,). Caches (num_blocks, block_size, G, D), those of integers with scales (num_blocks,
// block_size, G); block_table (B, max_blocks), seqlens_k (B,). The last axis of q, out and the caches is contiguous;
// all others may have any stride.
#pragma once

#include "params.cuh"

// How far blocks and groups of 16 tokens lie apart in both caches, in a unit that divides both: the place of any group
// then fits 32 bits, and one instruction makes an address of it.
struct CacheUnits {
  int bytes, block, group;
};

// How scales lie, of K and V alike.
struct ScaleLayout {
  int64 head;  // in bytes
  int token;   // in bytes
  int block_groups;
  CacheUnits units;
};

// Field for field the structured dtype PAGED_PARAMS of cupyattn/ops/attention/structs.
struct PagedParams {
  AttentionParams attention;  // sq is the most queries of a sequence, sk what the table can hold; packed arrays have a
                              // batch stride of 0
  BatchIntegers cu_seqlens_q;
  int64 table_batch;
  int table_block;   // in bytes
  int batch, total;  // sequences, and packed rows
  // Group g is in block (2 g * reciprocal) >> (32 + shift) of its sequence, exactly for g < 2^30.
  uint32 block_reciprocal;
  int block_shift;
  int block_span;  // what the groups of a block take together
  CacheUnits units;
  ScaleLayout scales;  // of caches of integers
};
static_assert(sizeof(PagedParams) == PAGED_PARAMS_BYTES, "its dtype in Python describes another struct");

// Packed rows of one sequence: clamped to the rows that exist, for any values of the array.
struct QuerySpan {
  int begin, count;

  __device__ __forceinline__ QuerySpan(const PagedParams& params, const void* cu_seqlens_q_g, int batch) {
    begin = clamp(batch_integer(cu_seqlens_q_g, params.cu_seqlens_q, batch), 0, params.total);
    const int end = clamp(batch_integer(cu_seqlens_q_g, params.cu_seqlens_q, batch + 1), begin, params.total);
    count = min(end - begin, params.attention.sq);
  }
};

// The rows of a CTA, those of a sequence's end first: under causal order they see most keys. Of packed sequences each
// has as many CTAs as it needs, found from the lengths by every warp; false for a CTA beyond the last one.
__device__ __forceinline__ bool coordinates_of_cta(TileCoordinates& coords, const PagedParams& params,
                                                   const void* cu_seqlens_q_g, int rows_per_cta) {
  const AttentionParams& attention = params.attention;
  if (cu_seqlens_q_g == nullptr) {
    coords = coordinates_of_cta(attention, rows_per_cta, /*last_rows_first=*/true);
    return true;
  }
  const int heads = attention.heads, cta_tile = blockIdx.x / heads;
  int before = 0;  // tiles of one head of the sequences before
  for (int first = 0; first < params.batch; first += kWarpSize) {
    const int batch = min(first + lane_index(), params.batch - 1);
    const QuerySpan span(params, cu_seqlens_q_g, batch);
    const int tiles = first + lane_index() < params.batch ? div_up(span.count, rows_per_cta) : 0;
    int up_to = tiles;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int other = __shfl_up_sync(kFullWarp, up_to, distance);
      if (lane_index() >= distance) up_to += other;
    }
    const uint32 beyond = __ballot_sync(kFullWarp, before + up_to > cta_tile);
    if (beyond != 0) {
      const int lane = __ffs(beyond) - 1;
      const int own_tiles = __shfl_sync(kFullWarp, tiles, lane);
      const int index = blockIdx.x - (before + __shfl_sync(kFullWarp, up_to, lane) - own_tiles) * heads;
      coords.batch = first + lane;
      const InterleavedTile at(index, own_tiles, attention.together);
      coords.head = at.head;
      coords.kv_head = coords.head / attention.group;
      coords.first_row = (own_tiles - 1 - at.tile) * rows_per_cta;
      coords.begin = __shfl_sync(kFullWarp, span.begin, lane);
      coords.sq = __shfl_sync(kFullWarp, span.count, lane);
      coords.sk = attention.sk;
      return true;
    }
    before += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
  }
  return false;
}

// The last query is at the position of the last token.
__device__ __forceinline__ int64 query_offset(const PagedParams& params, const void* seqlens_k_g,
                                              const TileCoordinates& coords) {
  return keys_in_use(params.attention, seqlens_k_g, coords.batch) - coords.sq;
}
