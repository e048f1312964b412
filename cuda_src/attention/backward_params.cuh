// What every attention backward kernel is told: the forward's AttentionParams, and the strides of the arrays that only
// a backward has.
//
// Shapes: dout (B, Sq, H, Dv), dlse (B, H, Sq), dq (B, Sq, H, D), dk (B, Sk, G, D), dv (B, Sk, G, Dv), dbias as bias,
// dsinks (H,). The last axis of dout, dq, dk and dv is contiguous, the others may have any stride.
#pragma once

#include "params.cuh"

// Field for field the structured dtype BACKWARD_PARAMS of cupyattn/kernels/registry.py.
struct BackwardParams {
  AttentionParams attention;  // out and lse are inputs here
  Strides dout, dlse, dq, dk, dv;
  ScoreStrides dbias;  // of what the kernels write; 0 along an axis that the bias broadcasts along
  int64 dsinks_stride;
  int64 zeroed;  // floats that the first kernel sets to zero, for others to add to
  int rows_padded;
  int batch, kv_heads;
  int accumulate;  // not 0: results are added to what is there
  float scale;     // softmax_scale
};
static_assert(sizeof(BackwardParams) == BACKWARD_PARAMS_BYTES, "cupyattn/kernels/registry.py describes another struct");

// Round once, after adding what is there.
template <typename Scalar>
__device__ __forceinline__ void store_gradient(Scalar* at_g, float x, const BackwardParams& params) {
  *at_g = from_float<Scalar>(params.accumulate ? to_float(*at_g) + x : x);
}
