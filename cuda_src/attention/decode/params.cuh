// Parameters of the decode kernels besides their array pointers.
//
// Shapes: q and out (B, Sq, H, D), lse (B, H, Sq), caches (num_blocks, block_size, G, D), block_table (B, max_blocks),
// seqlens_k and q_offset (B,). The last axis of each is contiguous but for the table's, which may have any stride as
// all others. Of dense keys and values (B, Sk, G, D) there is no table, and no array of lengths or offsets need be
// there.
#pragma once

#include "../params.cuh"

constexpr int kTileKeys = 16;  // what a warp takes at a time: within one block, whose size is a multiple of it

// Field for field the structured dtype DECODE_PARAMS of cupyattn/ops/attention/structs.
struct DecodeParams {
  AttentionParams
      attention;  // of paged k and v the strides of a block, a token in it, a head; sk is max_blocks * block_size
  Strides k_scales, v_scales;  // the same of scales (num_blocks, block_size, G), where caches of integers have them
  int64 table_batch, table_block;
  int batch, kv_heads;
  int block_tiles;  // tiles of a block
  int row_tiles;    // parts of the rows that share a key-value head, each with a loop over the keys
  int ctas;         // of the forward, in equal shares; 0: one for each segment, and nothing is shared
};
static_assert(sizeof(DecodeParams) == DECODE_PARAMS_BYTES, "its dtype in Python describes another struct");

// How many keys each sequence has, and the positions of its queries; null if DecodeParams has one value for all.
struct Lengths {
  const void *used_g, *q_offset_g;
};
