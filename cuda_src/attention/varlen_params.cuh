// Parameters of the kernels of packed sequences besides their array pointers.
//
// Shapes: q and out (total_q, H, D and Dv), k and v (total_k, G, D and Dv), lse (H, total_q): rows cu_seqlens_q[b] to
// cu_seqlens_q[b + 1], and of k and v those by cu_seqlens_k, belong to sequence b. Bias and mask broadcast to
// (B, H, longest of q, longest of k). The last axis of each is contiguous, the others may have any stride.
#pragma once

#include "packed_rows.cuh"

struct PackedBatch {
  BatchIntegers cu_seqlens_q, cu_seqlens_k;
  int batch, total_q, total_k;
  int ends_with_keys;  // the last query is at the last key in use; otherwise q_offset applies
};

// Field for field the structured dtype VARLEN_PARAMS of cupyattn/ops/attention/structs.
struct VarlenParams {
  AttentionParams attention;  // sq and sk are those of the longest sequence; packed arrays have a batch stride of 0
  PackedBatch packed;
};
static_assert(sizeof(VarlenParams) == VARLEN_PARAMS_BYTES, "its dtype in Python describes another struct");

__device__ __forceinline__ PackedRows packed_queries(const PackedBatch& packed, const AttentionParams& longest,
                                                     const SequencePointers& pointers) {
  return {pointers.cu_seqlens_q_g, packed.cu_seqlens_q, packed.batch, packed.total_q, longest.sq};
}
__device__ __forceinline__ PackedRows packed_keys(const PackedBatch& packed, const AttentionParams& longest,
                                                  const SequencePointers& pointers) {
  return {pointers.cu_seqlens_k_g, packed.cu_seqlens_k, packed.batch, packed.total_k, longest.sk};
}

// One sequence: its rows, and which of its keys each query sees.
struct PackedSequence {
  RowSpan queries, keys;
  int64 q_offset;
  int keys_in_use;

  __device__ __forceinline__ PackedSequence(const PackedBatch& packed, const AttentionParams& longest,
                                            const SequencePointers& pointers, int batch)
      : queries(packed_queries(packed, longest, pointers).of(batch)),
        keys(packed_keys(packed, longest, pointers).of(batch)),
        q_offset(0),
        keys_in_use(min(::keys_in_use(longest, pointers.seqused_k_g, batch), keys.count)) {
    q_offset = packed.ends_with_keys ? keys_in_use - queries.count : query_offset(longest, pointers.q_offsets_g, batch);
  }

  __device__ __forceinline__ KeyWindow window(const AttentionParams& longest) const {
    return KeyWindow(q_offset, longest.left, longest.right, keys_in_use);
  }
};

// The work of a CTA: a tile of one head, and the sequence of the tile.
struct PackedWork {
  PackedTile tile;
  PackedSequence sequence;

  // Beyond the last tile there is none.
  __device__ __forceinline__ bool exists() const { return tile.tiles > 0; }
};

// Find the tile of `rows` of this CTA; `by` are a sequence's own rows, its queries or keys. One warp searches. Each
// lane reads all of one of the first 32 sequences at once: a second read would wait for memory again.
//
// All threads read its answer from one place in shared memory, the first bytes of the kernel's buffers: what comes from
// an address that all have ptxas keeps in uniform registers, and with it whatever follows from it, as where a
// sequence's rows begin. With answers of each warp's own the loops had them in common registers, and spilled (packed
// sequences at head dim 64 modelled 0.65 in the backward of one pass for 0.68; `python -m cupyattn turing`, T4,
// 2026-11-23). The window each thread computes: read from there too, sm_90's code of head dim 128 spilled 264 bytes for
// 20 (ptxas 13.5 on PTX of compute_75, 2026-11-26).
template <typename Smem>
__device__ __forceinline__ PackedWork work_of_cta(const PackedBatch& packed, const AttentionParams& longest,
                                                  const SequencePointers& pointers, const PackedRows& rows,
                                                  RowSpan PackedSequence::* by, int heads, int together, int tile_rows,
                                                  Smem& smem) {
  static_assert(sizeof(PackedWork) <= sizeof(Smem), "the answer fits into the buffers");
  PackedWork& work_s = reinterpret_cast<PackedWork&>(smem);
  if (warp_index() == 0) {
    PackedSequence sequence(packed, longest, pointers, min(lane_index(), packed.batch - 1));
    const int own = lane_index() < packed.batch ? div_up((sequence.*by).count, tile_rows) : 0;
    const PackedTile tile = rows.of_cta(heads, together, tile_rows, own);
    if (tile.batch >= kWarpSize) sequence = PackedSequence(packed, longest, pointers, tile.batch);
    if (lane_index() == tile.batch % kWarpSize) work_s = {tile, sequence};
  }
  __syncthreads();  // work: written
  const PackedWork work = work_s;
  __syncthreads();  // work: read; the buffers take its place
  return work;
}

template <typename Smem>
__device__ __forceinline__ PackedWork queries_of_cta(const PackedBatch& packed, const AttentionParams& longest,
                                                     const SequencePointers& pointers, int rows_per_cta, Smem& smem) {
  return work_of_cta(packed, longest, pointers, packed_queries(packed, longest, pointers), &PackedSequence::queries,
                     longest.heads, longest.together, rows_per_cta, smem);
}

// Those of a sequence's end come first: under causal order they see most keys.
__device__ __forceinline__ TileCoordinates query_coordinates(const PackedWork& work, const AttentionParams& longest,
                                                             int rows_per_cta) {
  const PackedTile& tile = work.tile;
  const RowSpan& rows = work.sequence.queries;
  return {tile.batch,
          tile.head,
          tile.head / longest.group,
          (tile.tiles - 1 - tile.tile) * rows_per_cta,
          rows.count,
          work.sequence.keys.count,
          rows.begin};
}
