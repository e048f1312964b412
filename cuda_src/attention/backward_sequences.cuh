// One source of a backward kernel for a batch and for packed sequences (sequences.cuh): the keys of a CTA, and a
// sequence's parameters and rows in scratch memory.
#pragma once

#include "block_query_loop.cuh"
#include "sequences.cuh"

#if PACKED
#include "varlen_backward_params.cuh"

using GradientParams = VarlenBackwardParams;
__device__ __forceinline__ const BackwardParams& backward_of(const GradientParams& params) { return params.backward; }
__device__ __forceinline__ int batch_of(const GradientParams& params) { return params.packed.batch; }

// The parameters of one sequence, which counts as a batch of one.
__device__ __forceinline__ BackwardParams params_of(const GradientParams& params, const RowSpan& queries,
                                                    const RowSpan& keys) {
  BackwardParams own = params.backward;
  own.attention.sq = queries.count;
  own.attention.sk = keys.count;
  return own;
}

// The sequence's number in scratch memory, and its first row there.
struct ScratchBatch {
  int batch, begin;

  __device__ __forceinline__ ScratchBatch(const RowSpan& queries, int batch_)
      : batch(0), begin(scratch_begin(queries, batch_)) {}
};

// Rows of the scratch of the tensor-core kernels from row `at` of a matrix on: of which sequence and head they are, and
// which row of the sequence the first of them is. It is negative if lengths fall.
struct ScratchRows {
  int batch, head, row;
  RowSpan rows;    // of the sequence, in arrays of queries
  uint32 scratch;  // the first row among those of all matrices

  __device__ __forceinline__ ScratchRows(const GradientParams& params, const SequencePointers& pointers, int matrix,
                                         int at)
      : head(matrix) {
    const PackedRows queries = packed_queries(params.packed, params.backward.attention, pointers);
    batch = sequence_of_scratch(queries, at);
    rows = queries.of(batch);
    row = at - scratch_begin(rows, batch);
    scratch = scratch_row(params.backward, 0, head, at);
  }
};

// The rows of V after those of queries in the grid of backward_delta.cu: how many each matrix has, and where a
// sequence's begin.
__device__ __forceinline__ int value_rows(const GradientParams& params) {
  return padded_rows(params.packed.total_k, params.packed.batch);
}
__device__ __forceinline__ int64 first_value_row(const GradientParams& params, const RowSpan& keys, int batch,
                                                 int kv_head) {
  return static_cast<int64>(kv_head) * value_rows(params) + scratch_begin(keys, batch);
}
struct ValueRow {
  int batch, kv_head, row;  // of the array
  bool in_use;

  __device__ __forceinline__ ValueRow(const GradientParams& params, const SequencePointers& pointers, int64 number)
      : kv_head(number / value_rows(params)) {
    const AttentionParams& longest = params.backward.attention;
    const int at = number % value_rows(params);
    batch = sequence_of_scratch(packed_keys(params.packed, longest, pointers), at);
    const PackedSequence sequence(params.packed, longest, pointers, batch);
    const int key = at - scratch_begin(sequence.keys, batch);
    row = sequence.keys.begin + key;
    in_use = 0 <= key && key < sequence.keys_in_use;
  }
};

// The float32 kernels' delta of one head of a sequence.
template <typename Scalar>
__device__ __forceinline__ Scalar* delta_rows(Scalar* delta_g, const AttentionParams& longest, const RowSpan& queries,
                                              int /*batch*/, int head) {
  return delta_g + static_cast<int64>(queries.begin) * longest.heads + static_cast<int64>(head) * queries.count;
}

// The keys of a CTA, and their sequence. The first of them is found through `smem`, the kernel's buffers. Without
// kInterleaved a batch has the tiles of one head after those of another, whatever the parameters ask for.
template <int kKeys, int kTileQ, bool kInterleaved = true>
struct CtaKeys {
  const Sequences& sequences;
  PackedWork work;

  template <typename Blocks, typename Smem>
  __device__ __forceinline__ CtaKeys(const Sequences& sequences_, const Blocks&, Smem& smem)
      : sequences(sequences_),
        work(keys_of_cta(sequences_.packed, sequences_.attention, sequences_.pointers, kKeys, smem)) {}

  // False for a CTA beyond the last tile.
  __device__ __forceinline__ bool exist() const { return work.exists(); }
  __device__ __forceinline__ KeyTileCoordinates coords() const {
    KeyTileCoordinates coords = key_coordinates(work.tile, kKeys);
    coords.scratch_begin = scratch_begin(queries(), coords.batch);
    return coords;
  }
  __device__ __forceinline__ KeyWindow window() const { return work.sequence.window(sequences.attention); }
  __device__ __forceinline__ int64 q_offset() const { return work.sequence.q_offset; }
  __device__ __forceinline__ const RowSpan& queries() const { return work.sequence.queries; }
  __device__ __forceinline__ const RowSpan& keys() const { return work.sequence.keys; }
  // keys(), read once more: kept through the loop they would take registers.
  __device__ __forceinline__ RowSpan keys_again() const { return sequences.keys(work.tile.batch); }
};
#else
using GradientParams = BackwardParams;
__device__ __forceinline__ const AttentionParams& attention_of(const BackwardParams& params) {
  return params.attention;
}
__device__ __forceinline__ const BackwardParams& backward_of(const GradientParams& params) { return params; }
__device__ __forceinline__ int batch_of(const GradientParams& params) { return params.batch; }
__device__ __forceinline__ const BackwardParams& params_of(const GradientParams& params, const RowSpan&,
                                                           const RowSpan&) {
  return params;
}

struct ScratchBatch {
  int batch;
  static constexpr int begin = 0;

  __device__ __forceinline__ ScratchBatch(const RowSpan&, int batch_) : batch(batch_) {}
};

struct ScratchRows {
  int batch, head, row;
  RowSpan rows;
  uint32 scratch;

  template <typename Integer>
  __device__ __forceinline__ ScratchRows(const GradientParams& params, const SequencePointers&, Integer matrix, int at)
      : row(at), rows({0, params.attention.sq}) {
    head = matrix % params.attention.heads;
    batch = matrix / params.attention.heads;
    scratch = scratch_row(params, batch, head, at);
  }
};

__device__ __forceinline__ int value_rows(const GradientParams& params) { return padded_rows(params.attention.sk); }
__device__ __forceinline__ int64 first_value_row(const GradientParams& params, const RowSpan&, int batch, int kv_head) {
  return (static_cast<int64>(batch) * (params.attention.heads / params.attention.group) + kv_head) * value_rows(params);
}
struct ValueRow {
  int batch, kv_head, row;
  bool in_use;

  __device__ __forceinline__ ValueRow(const GradientParams& params, const SequencePointers& pointers, int64 number) {
    const int padded = value_rows(params), kv_heads = params.attention.heads / params.attention.group;
    row = number % padded;
    const int64 matrix = number / padded;
    kv_head = matrix % kv_heads;
    batch = matrix / kv_heads;
    in_use = row < keys_in_use(params.attention, pointers.seqused_k_g, batch);
  }
};

template <typename Scalar>
__device__ __forceinline__ Scalar* delta_rows(Scalar* delta_g, const AttentionParams& attention, const RowSpan&,
                                              int batch, int head) {
  return delta_g + (static_cast<int64>(batch) * attention.heads + head) * attention.sq;
}

template <int kKeys, int kTileQ, bool kInterleaved = true>
struct CtaKeys {
  const Sequences& sequences;
  KeyTileCoordinates own;

  template <typename Blocks, typename Smem>
  __device__ __forceinline__ CtaKeys(const Sequences& sequences_, const Blocks& blocks, Smem&)
      : sequences(sequences_),
        own(in_order_of_work<kTileQ>(
            sequences_.attention,
            KeyTileCoordinates(sequences_.attention, kKeys, kInterleaved ? sequences_.attention.kv_together : 1,
                               kInterleaved ? sequences_.attention.batches : 1),
            kKeys, blocks)) {}

  __device__ __forceinline__ static bool exist() { return true; }
  __device__ __forceinline__ const KeyTileCoordinates& coords() const { return own; }
  __device__ __forceinline__ KeyWindow window() const { return sequences.window(own.batch); }
  __device__ __forceinline__ int64 q_offset() const { return sequences.q_offset(own.batch); }
  __device__ __forceinline__ RowSpan queries() const { return sequences.queries(own.batch); }
  __device__ __forceinline__ RowSpan keys() const { return sequences.keys(own.batch); }
  __device__ __forceinline__ RowSpan keys_again() const { return sequences.keys(own.batch); }
};
#endif
