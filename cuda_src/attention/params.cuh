// Parameters of every dense attention kernel besides its array pointers: lengths, strides, the mask's window, the
// scale.
//
// Shapes: q (B, Sq, H, D), k (B, Sk, G, D), v (B, Sk, G, Dv), out (B, Sq, H, Dv), lse (B, H, Sq). The last axis of each
// is contiguous, the others may have any stride (in items; negative and zero too). H is a multiple of G: query head h
// reads key-value head h / (H / G).
#pragma once

#include "masks.cuh"
#include "../common/numeric.cuh"
#include "../common/philox.cuh"

struct Strides {
  int64 batch, seq, head;
};

// An optional (B,) array of integers, int32 or int64: NumPy makes the one or the other.
struct BatchIntegers {
  int64 stride;  // in items
  int64 is_int64;
};

// An optional array that broadcasts to (B, H, Sq, Sk), in items; 0 along an axis that it does not have.
struct ScoreStrides {
  int64 batch, head, row, key;
};

// Parameters of the options.
struct ScoreParams {
  ScoreStrides bias, mask;
  int64 slopes_batch, slopes_head, sinks_stride;
  uint64 seed;
  uint32 keep_from;  // a probability is kept whose 16 random bits are at least this
  float keep_scale;  // 1 / (1 - dropout_p)
  float softcap_in;  // 2 * softmax_scale / softcap * log2(e)
  float softcap;
  // The position of this call's scores among those that dropout draws its mask for.
  int first_batch, first_query;
  uint32 first_counter;  // of its first key, which is a multiple of 32: an eighth of that
};

__device__ __forceinline__ Philox4 dropout_words(const ScoreParams& params, int batch, int head, int query, int key) {
  return dropout_words(params.seed, params.first_batch + batch, head, params.first_query + query, key,
                       params.first_counter);
}

// Field for field the structured dtype ATTENTION_PARAMS of cupyattn/ops/attention/structs.
struct AttentionParams {
  Strides q, k, v, out, lse;
  BatchIntegers q_offsets, seqused_k;
  int64 q_offset;                   // added to the sequence's item of q_offsets; null counts as 0
  int64 offset_least, offset_most;  // the item is clamped to them
  int64 left, right;                // of the window; kUnbounded where it has no limit
  int heads, group;                 // H, and H / G
  int sq, sk;
  float scale_log2;  // softmax_scale * log2(e)
  float softmax_scale;
  ScoreParams scores;
  int together;     // heads whose tiles of queries are interleaved in the grid: a divisor of B * H
  int kv_together;  // key-value heads whose tiles of keys are: a divisor of B * G
  int batches;      // batch elements among them, whose like heads are neighbours: a divisor of B
};
static_assert(sizeof(AttentionParams) == ATTENTION_PARAMS_BYTES, "its dtype in Python describes another struct");

__device__ __forceinline__ int64 batch_integer(const void* items, BatchIntegers layout, int batch) {
  return layout.is_int64 ? static_cast<const int64*>(items)[batch * layout.stride]
                         : static_cast<const int*>(items)[batch * layout.stride];
}

// The CTAs of heads with equally many tiles: one head's after another's, or those of `together` heads, the first tile
// of each before the second.
struct InterleavedTile {
  int head, tile;

  __device__ __forceinline__ InterleavedTile(uint32 index, uint32 tiles, uint32 together)
      : head(index / (tiles * together) * together + index % together), tile(index / together % tiles) {}
};

// The head that has this number among those of all batch elements: one element's after another's, or those of `batches`
// elements, the first head of each before the second.
struct BatchHead {
  int batch, head;

  __device__ __forceinline__ BatchHead(int number, int heads, int batches)
      : batch(number / (batches * heads) * batches + number % batches), head(number / batches % heads) {}
};

// The tile coordinates of one CTA (cooperative thread array, a block of threads): query rows of one head of one
// sequence. The grid is flat, so that neither batch nor head count meets the 65,535 of the grid's y and z. Rows of one
// head are neighbours and share its keys in L2, or those of interleaved heads.
struct TileCoordinates {
  int batch, head, kv_head, first_row;
  int sq, sk;  // queries and keys of the sequence
  int begin;   // of packed sequences the row of this one's first query
};

__device__ __forceinline__ TileCoordinates coordinates_of_tile(const AttentionParams& params, uint32 index,
                                                               int rows_per_cta, bool last_rows_first) {
  const int tiles = div_up(params.sq, rows_per_cta);
  const InterleavedTile at(index, tiles, params.together);
  TileCoordinates coords;
  coords.first_row = (last_rows_first ? tiles - 1 - at.tile : at.tile) * rows_per_cta;
  const BatchHead own(at.head, params.heads, params.batches);
  coords.head = own.head;
  coords.batch = own.batch;
  coords.kv_head = coords.head / params.group;
  coords.sq = params.sq;
  coords.sk = params.sk;
  coords.begin = 0;
  return coords;
}

__device__ __forceinline__ TileCoordinates coordinates_of_cta(const AttentionParams& params, int rows_per_cta,
                                                              bool last_rows_first = false) {
  return coordinates_of_tile(params, blockIdx.x, rows_per_cta, last_rows_first);
}

template <typename Scalar>
__device__ __forceinline__ Scalar* head_rows(Scalar* array, const Strides& strides, int batch, int head, int row) {
  return array + batch * strides.batch + head * strides.head + row * strides.seq;
}

// The arrays that describe the sequences of a call. Each is optional: null if it is not given.
struct SequencePointers {
  const void *cu_seqlens_q_g, *cu_seqlens_k_g, *q_offsets_g, *seqused_k_g;
};

// Rows of one sequence in an array.
struct RowSpan {
  int begin, count;
};

// An array from the first of these rows on.
template <typename Scalar>
__device__ __forceinline__ Scalar* rows_from(Scalar* array_g, const Strides& strides, const RowSpan& rows) {
  return array_g + rows.begin * strides.seq;
}

// A query's row of q, out or lse.
template <typename Scalar>
__device__ __forceinline__ Scalar* query_row(Scalar* array, const Strides& strides, const TileCoordinates& coords,
                                             int row) {
  return head_rows(array, strides, coords.batch, coords.head, coords.begin + row);
}

// The keys from there on do not exist.
__device__ __forceinline__ int keys_in_use(const AttentionParams& params, const void* seqused_k_g, int batch) {
  if (seqused_k_g == nullptr) return params.sk;
  return clamp(batch_integer(seqused_k_g, params.seqused_k, batch), 0, params.sk);
}

// Query i is at key position i + query_offset.
__device__ __forceinline__ int64 query_offset(const AttentionParams& params, const void* q_offsets_g, int batch) {
  if (q_offsets_g == nullptr) return params.q_offset;
  const int64 given = batch_integer(q_offsets_g, params.q_offsets, batch);
  return params.q_offset + min(max(given, params.offset_least), params.offset_most);
}

// The keys that each row of a sequence sees.
__device__ __forceinline__ KeyWindow sequence_window(const AttentionParams& params, const void* q_offsets_g,
                                                     const void* seqused_k_g, int batch) {
  return KeyWindow(query_offset(params, q_offsets_g, batch), params.left, params.right,
                   keys_in_use(params, seqused_k_g, batch));
}
