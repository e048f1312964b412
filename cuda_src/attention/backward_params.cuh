// Parameters of the backward kernels besides their array pointers, and the scratch memory that they share.
//
// Shapes: as in params.cuh, and dout (B, Sq, H, Dv), dlse (B, H, Sq), dq, dk and dv like q, k and v. Scratch, float32:
//   stats    (B, H, rows_padded / 2, {L, L', delta, delta'}): the statistics of two rows in 16 bytes
//   dq_acc   (B, H, rows_padded / 16, D / 8, 4, 32): dq / softmax_scale as accumulator fragments of mma.m16n8k8, so
//            that a warp's atomic additions cover whole 128-byte lines
//   sizes, scales: see tensor_core/gradient_scale.cuh
#pragma once

#include "params.cuh"

// Field for field the structured dtype BACKWARD_PARAMS of cupyattn/ops/attention/structs.
struct BackwardParams {
  AttentionParams attention;  // of the forward; out and lse are inputs here
  Strides dout, dlse, dq, dk, dv;
  ScoreStrides dbias;  // of what the kernels write: dbias itself, or a float32 scratch
  int64 dsinks_stride;
  int64 zeroed;  // floats of scratch that must be zero before the additions
  int batch;
  int rows_padded;  // Sq, rounded up to a multiple of kRowPad
  int accumulate;   // gradients are added to what their arrays hold
  float scale;      // softmax_scale
};
static_assert(sizeof(BackwardParams) == BACKWARD_PARAMS_BYTES, "its dtype in Python describes another struct");

constexpr int kRowPad = 64;  // a multiple of every tile of query rows

// Row `row` of a head among all rows of the scratch. 32 bits: the rows' statistics alone would take 32 GiB beyond that.
__device__ __forceinline__ uint32 scratch_row(const BackwardParams& params, int batch, int head, int row) {
  return static_cast<uint32>(batch * params.attention.heads + head) * params.rows_padded + row;
}

// All of them.
__device__ __forceinline__ int64 scratch_rows(const BackwardParams& params) {
  return static_cast<int64>(params.batch) * params.attention.heads * params.rows_padded;
}

// Rows of one sequence, up to whole tiles; of several that are packed, each from such a tile on.
__device__ __forceinline__ int padded_rows(int rows) { return div_up(rows, kRowPad) * kRowPad; }
__device__ __forceinline__ int padded_rows(int rows, int sequences) { return (rows / kRowPad + sequences) * kRowPad; }

// The offset of the tile of 16 rows in dq_acc whose first row is `row` of the scratch.
template <int kChunks>
__device__ __forceinline__ int64 accumulator_offset(uint32 row) {
  return static_cast<int64>(row) * (kChunks * 8);
}

// The tile coordinates of a CTA that owns keys: neighbouring keys of one key-value head. The grid is flat and in the
// order of query rows'. Under causal order earlier keys are seen by more queries: they start first.
struct KeyTileCoordinates {
  int batch, kv_head, first_key;
  int scratch_batch;      // the sequence's number in scratch memory
  int scratch_begin = 0;  // and of packed sequences its first query there

  __device__ __forceinline__ KeyTileCoordinates(int batch_, int kv_head_, int first_key_, int scratch_batch_)
      : batch(batch_), kv_head(kv_head_), first_key(first_key_), scratch_batch(scratch_batch_) {}

  __device__ __forceinline__ KeyTileCoordinates(const AttentionParams& params, int keys_per_cta)
      : KeyTileCoordinates(params, keys_per_cta, params.kv_together, params.batches) {}

  __device__ __forceinline__ KeyTileCoordinates(const AttentionParams& params, int keys_per_cta, uint32 together,
                                                uint32 batches) {
    const InterleavedTile at(blockIdx.x, div_up(params.sk, keys_per_cta), together);
    const BatchHead own(at.head, params.heads / params.group, batches);
    first_key = at.tile * keys_per_cta;
    kv_head = own.head;
    batch = scratch_batch = own.batch;
  }
};

// Round once, after adding what is there.
template <typename Scalar>
__device__ __forceinline__ void store_gradient(Scalar* at_g, float x, const BackwardParams& params) {
  *at_g = from_float<Scalar>(params.accumulate ? to_float(*at_g) + x : x);
}
