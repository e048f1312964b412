// Modifiers: the effect of a user's own expressions on a score, if a call has any.
//
// With MODIFIED the library writes the header below from the expressions (ops/attention/kernels/modifiers.py):
// Modifiers holds the arrays that they name. An entry takes these after its other arrays, MODIFIER_ARRAYS, with their
// strides after all else, MODIFIER_STRIDES, and passes on MODIFIERS, which is made of both.
#pragma once

#include "../common/numeric.cuh"
#include "block_states.cuh"
#include "no_modifiers.cuh"

// An array with kAxes axes as an expression indexes it: slopes[b][h]. An item of a float dtype is read as a float.
template <typename Item>
__device__ __forceinline__ Item value_of(Item item) {
  return item;
}
__device__ __forceinline__ float value_of(float16 item) { return to_float(item); }
#ifdef BFLOAT16
__device__ __forceinline__ float value_of(bfloat16 item) { return to_float(item); }
#endif

template <typename Item, int kAxes>
struct Indexed {
  const Item* items_g;
  const int64* strides;

  // For an array without axes.
  __device__ __forceinline__ auto item() const { return value_of(*items_g); }
  __device__ __forceinline__ auto operator[](int64 index) const {
    const Item* from_g = items_g + index * strides[0];
    if constexpr (kAxes == 1) {
      return value_of(*from_g);
    } else {
      return Indexed<Item, kAxes - 1>{from_g, strides + 1};
    }
  }
};

#if MODIFIED
// NVRTC has no <math.h>.
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#include <cupyattn/modifiers>
#else
#define MODIFIER_ARRAYS
#define MODIFIER_STRIDES
#define MODIFIERS \
  {               \
  }
using Modifiers = NoModifiers;
#endif

// The arrays of a forward, besides keys.
template <typename Scalar>
struct ForwardArrays {
  const Scalar* q_g;
  Scalar* out_g;
  float* lse_g;
  const void *bias_g, *mask_g, *slopes_g, *sinks_g;
  Modifiers modifiers;
};
