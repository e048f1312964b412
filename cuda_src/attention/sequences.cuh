// One source for a batch of sequences of equal length and for sequences packed into one array: Sequences describes all
// of them, CtaQueries the query rows of a CTA.
//
// The kernel's parameter struct, whose size is a macro, chooses between the two. A source names its entry ENTRY(name)
// and takes cu_seqlens_q and cu_seqlens_k by PACKED_ARRAYS, or the first alone by PACKED_QUERIES. CU_SEQLENS_Q and
// CU_SEQLENS_K name these parameters; they are null in a batch.
//
// Packed sequences need more CTAs than a batch of as many tokens. The grid has as many as any lengths could need tiles,
// H (or G) times; the longest sequences start first, and CTAs beyond the last tile return (packed_rows.cuh).
#pragma once

#include "block_key_loop.cuh"

#if defined(VARLEN_PARAMS_BYTES)
#define PACKED true
#define ENTRY(name, ...) name##_varlen##__VA_ARGS__
#define PACKED_QUERIES , const void* cu_seqlens_q_g
#define PACKED_ARRAYS PACKED_QUERIES, const void* cu_seqlens_k_g
#define CU_SEQLENS_Q cu_seqlens_q_g
#define CU_SEQLENS_K cu_seqlens_k_g
#include "varlen_params.cuh"

using ForwardParams = VarlenParams;
__device__ __forceinline__ const AttentionParams& attention_of(const VarlenParams& params) { return params.attention; }

struct Sequences {
  const AttentionParams& attention;  // of the longest sequence
  const PackedBatch& packed;
  SequencePointers pointers;

  template <typename Params>
  __device__ __forceinline__ Sequences(const Params& params, const SequencePointers& pointers_)
      : attention(attention_of(params)), packed(params.packed), pointers(pointers_) {}

  __device__ __forceinline__ RowSpan queries(int batch) const {
    return packed_queries(packed, attention, pointers).of(batch);
  }
  __device__ __forceinline__ RowSpan keys(int batch) const {
    return packed_keys(packed, attention, pointers).of(batch);
  }
};

// The query rows of a CTA, and their sequence. The first of them is found through `smem`, the kernel's buffers.
template <int kTileQ, int kTileK>
struct CtaQueries {
  const Sequences& sequences;
  PackedWork work;

  template <typename Blocks, typename Smem>
  __device__ __forceinline__ CtaQueries(const Sequences& sequences_, const Blocks&, Smem& smem)
      : sequences(sequences_),
        work(queries_of_cta(sequences_.packed, sequences_.attention, sequences_.pointers, kTileQ, smem)) {}

  // False for a CTA beyond the last tile.
  __device__ __forceinline__ bool exist() const { return work.exists(); }
  __device__ __forceinline__ TileCoordinates coords() const {
    return query_coordinates(work, sequences.attention, kTileQ);
  }
  __device__ __forceinline__ KeyWindow window() const { return work.sequence.window(sequences.attention); }
  __device__ __forceinline__ int64 q_offset() const { return work.sequence.q_offset; }
  // The rows of the sequence in arrays of queries and of keys.
  __device__ __forceinline__ const RowSpan& queries() const { return work.sequence.queries; }
  __device__ __forceinline__ const RowSpan& keys() const { return work.sequence.keys; }
};
#else
#define PACKED false
#define ENTRY(name, ...) name##__VA_ARGS__
#define PACKED_QUERIES
#define PACKED_ARRAYS
#define CU_SEQLENS_Q nullptr
#define CU_SEQLENS_K nullptr

using ForwardParams = AttentionParams;
__device__ __forceinline__ const AttentionParams& attention_of(const AttentionParams& params) { return params; }

struct Sequences {
  const AttentionParams& attention;
  SequencePointers pointers;

  template <typename Params>
  __device__ __forceinline__ Sequences(const Params& params, const SequencePointers& pointers_)
      : attention(attention_of(params)), pointers(pointers_) {}

  __device__ __forceinline__ KeyWindow window(int batch) const {
    return sequence_window(attention, pointers.q_offsets_g, pointers.seqused_k_g, batch);
  }
  __device__ __forceinline__ int64 q_offset(int batch) const {
    return query_offset(attention, pointers.q_offsets_g, batch);
  }
  __device__ __forceinline__ RowSpan queries(int) const { return {0, attention.sq}; }
  __device__ __forceinline__ RowSpan keys(int) const { return {0, attention.sk}; }
};

// Under causal order later rows see more keys: they start first. A block mask's lists have a different order.
__device__ __forceinline__ constexpr bool last_rows_first(NoBlocks) { return true; }
__device__ __forceinline__ constexpr bool last_rows_first(const BlockLists&) { return false; }

template <int kTileQ, int kTileK>
struct CtaQueries {
  const Sequences& sequences;
  TileCoordinates own;

  template <typename Blocks, typename Smem>
  __device__ __forceinline__ CtaQueries(const Sequences& sequences_, const Blocks& blocks, Smem&)
      : sequences(sequences_),
        own(in_order_of_work<kTileQ, kTileK>(coordinates_of_cta(sequences_.attention, kTileQ, last_rows_first(blocks)),
                                             blocks)) {}

  __device__ __forceinline__ static bool exist() { return true; }
  __device__ __forceinline__ const TileCoordinates& coords() const { return own; }
  __device__ __forceinline__ KeyWindow window() const { return sequences.window(own.batch); }
  __device__ __forceinline__ int64 q_offset() const { return sequences.q_offset(own.batch); }
  __device__ __forceinline__ RowSpan queries() const { return sequences.queries(own.batch); }
  __device__ __forceinline__ RowSpan keys() const { return sequences.keys(own.batch); }
};
#endif
