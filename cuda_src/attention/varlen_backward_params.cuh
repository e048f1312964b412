// Parameters of the backward kernels of packed sequences besides their array pointers. A kernel treats its sequence as
// a batch of one, whose arrays begin at its rows.
//
// Shapes: as in varlen_params.cuh, and dout (total_q, H, Dv), dlse (H, total_q), dq, dk and dv like q, k and v. Scratch
// of the tensor-core kernels as in backward_params.cuh, of one batch element: the rows of a sequence begin at a
// multiple of kRowPad in it, after those of all earlier ones. Scratch of the float32 kernels: delta, (H, rows) for each
// sequence, one after the other.
#pragma once

#include "backward_params.cuh"
#include "varlen_params.cuh"

// Field for field the structured dtype VARLEN_BACKWARD_PARAMS of cupyattn/ops/attention/structs.
struct VarlenBackwardParams {
  BackwardParams backward;  // rows_padded are those of all sequences together
  PackedBatch packed;
};
static_assert(sizeof(VarlenBackwardParams) == VARLEN_BACKWARD_PARAMS_BYTES,
              "its dtype in Python describes another struct");

__device__ __forceinline__ const AttentionParams& attention_of(const VarlenBackwardParams& params) {
  return params.backward.attention;
}

// Under causal order earlier keys are seen by more queries: they start first.
template <typename Smem>
__device__ __forceinline__ PackedWork keys_of_cta(const PackedBatch& packed, const AttentionParams& longest,
                                                  const SequencePointers& pointers, int keys_per_cta, Smem& smem) {
  return work_of_cta(packed, longest, pointers, packed_keys(packed, longest, pointers), &PackedSequence::keys,
                     longest.heads / longest.group, longest.kv_together, keys_per_cta, smem);
}
__device__ __forceinline__ KeyTileCoordinates key_coordinates(const PackedTile& tile, int keys_per_cta) {
  return {tile.batch, tile.head, tile.tile * keys_per_cta, /*scratch_batch=*/0};
}

// The first row of sequence `batch` in the scratch of a head.
__device__ __forceinline__ int scratch_begin(const RowSpan& queries, int batch) {
  return (queries.begin + batch * kRowPad) / kRowPad * kRowPad;
}

// Whose rows a row of the scratch of a head is among: those of the last sequence that begins before it. There is one,
// the same for all rows of a CTA.
__device__ __forceinline__ int sequence_of_scratch(const PackedRows& queries, int row) {
  const int first = row / kRowPad * kRowPad;
  return queries.last_from_of_warp(first, [&](int sequence) { return scratch_begin(queries.of(sequence), sequence); });
}
