// The members of a batch of products: which one a CTA works on, and where its matrices lie.
//
// CTAs of a member are neighbours in the grid. All of this stays in uniform registers: it divides by multiplication.
#pragma once

#include "../../common/config.cuh"

constexpr int kBatchAxes = 4;

// n / divisor for n < 2^31: multiplier = ceil(2^(31 + shift) / divisor), shift = ceil(log2(divisor)).
struct Divisor {
  uint32 divisor, multiplier, shift;

  __device__ __forceinline__ uint32 quotient(uint32 n) const { return __umulhi(2 * n, multiplier) >> shift; }
};

// The first items of a member's matrices, counted from those of the arrays.
struct Member {
  int64 a, b, out;
};

// Field for field BATCH_PARAMS of cupyattn/ops/linear/kernels_matmul.py. Strides are in items; a broadcast axis has 0.
// The last axis varies first. An absent axis has extent 1.
struct BatchParams {
  int64 strides[kBatchAxes][3];  // of a, b and out
  Divisor extents[kBatchAxes];   // the first one is not used: what is left is its index
  Divisor ctas;                  // of one member

  __device__ __forceinline__ uint32 member() const { return ctas.quotient(blockIdx.x); }

  // This CTA among those of its member.
  __device__ __forceinline__ uint32 cta_of(uint32 member) const { return blockIdx.x - member * ctas.divisor; }

  __device__ __forceinline__ Member place(uint32 member) const {
    Member at = {0, 0, 0};
#pragma unroll
    for (int axis = kBatchAxes - 1; axis >= 0; axis--) {
      const uint32 outer = axis > 0 ? extents[axis].quotient(member) : 0;
      const uint32 index = member - outer * extents[axis].divisor;
      at.a += index * strides[axis][0];
      at.b += index * strides[axis][1];
      at.out += index * strides[axis][2];
      member = outer;
    }
    return at;
  }
};
static_assert(sizeof(BatchParams) == BATCH_PARAMS_BYTES, "BatchParams and its NumPy twin are one layout");
