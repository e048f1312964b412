// What the kernels of packed sequences are told besides their array pointers.
//
// Shapes: q and out (total_q, H, D and Dv), k and v (total_k, G, D and Dv), lse (H, total_q): rows cu_seqlens_q[b] to
// cu_seqlens_q[b + 1], and of k and v those that cu_seqlens_k says, belong to sequence b. Bias and mask broadcast to
// (B, H, longest of q, longest of k). The last axis of each is contiguous, the others may have any stride.
#pragma once

#include "packed_rows.cuh"

struct PackedBatch {
  BatchIntegers cu_seqlens_q, cu_seqlens_k;
  int batch, total_q, total_k;
  int ends_with_keys;  // the last query stands at the last key in use; otherwise q_offset says where
};

// Field for field the structured dtype VARLEN_PARAMS of cupyattn/kernels/structs.
struct VarlenParams {
  AttentionParams attention;  // sq and sk are those of the longest sequence; packed arrays have a batch stride of 0
  PackedBatch packed;
};
static_assert(sizeof(VarlenParams) == VARLEN_PARAMS_BYTES, "cupyattn/kernels/structs describes another struct");

struct PackedPointers {
  const void *cu_seqlens_q_g, *cu_seqlens_k_g, *q_offsets_g, *seqused_k_g;
};

__device__ __forceinline__ PackedRows packed_queries(const PackedBatch& packed, const AttentionParams& longest,
                                                     const PackedPointers& pointers) {
  return {pointers.cu_seqlens_q_g, packed.cu_seqlens_q, packed.batch, packed.total_q, longest.sq};
}
__device__ __forceinline__ PackedRows packed_keys(const PackedBatch& packed, const AttentionParams& longest,
                                                  const PackedPointers& pointers) {
  return {pointers.cu_seqlens_k_g, packed.cu_seqlens_k, packed.batch, packed.total_k, longest.sk};
}

// An array from the first of these rows on.
template <typename Scalar>
__device__ __forceinline__ Scalar* rows_from(Scalar* array_g, const Strides& strides, const RowSpan& rows) {
  return array_g + rows.begin * strides.seq;
}

// One sequence: its rows, and which of its keys each query sees.
struct PackedSequence {
  RowSpan queries, keys;
  int64 q_offset;
  KeyWindow window;

  __device__ __forceinline__ PackedSequence(const PackedBatch& packed, const AttentionParams& longest,
                                            const PackedPointers& pointers, int batch)
      : queries(packed_queries(packed, longest, pointers).of(batch)),
        keys(packed_keys(packed, longest, pointers).of(batch)),
        q_offset(packed.ends_with_keys ? keys_in_use(longest, pointers, keys, batch) - queries.count
                                       : query_offset(longest, pointers.q_offsets_g, batch)),
        window(q_offset, longest.left, longest.right, keys_in_use(longest, pointers, keys, batch)) {}

 private:
  __device__ __forceinline__ static int keys_in_use(const AttentionParams& longest, const PackedPointers& pointers,
                                                    const RowSpan& keys, int batch) {
    return min(::keys_in_use(longest, pointers.seqused_k_g, batch), keys.count);
  }
};

// The rows of a CTA; false where there are none left. Those of a sequence's end come first: under causal order they see
// most keys.
template <typename Smem>
__device__ __forceinline__ bool place_of_cta(Place& place, const PackedBatch& packed, const AttentionParams& longest,
                                             const PackedPointers& pointers, int rows_per_cta, Smem& smem) {
  const PackedRows queries = packed_queries(packed, longest, pointers);
  PackedTile own;
  if (!queries.find(own, longest.heads, longest.together, rows_per_cta, smem)) return false;
  const RowSpan rows = queries.of(own.batch);
  const int keys = packed_keys(packed, longest, pointers).of(own.batch).count;
  place = {own.batch, own.head,  own.head / longest.group, (own.tiles - 1 - own.tile) * rows_per_cta, rows.count,
           keys,      rows.begin};
  return true;
}
