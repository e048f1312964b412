// The stand-in for the user's expressions in a call without any; modifiers.cuh has those of other calls.
#pragma once

#include "block_lists.cuh"

struct NoModifiers {
  static constexpr bool kScore = false, kMask = false, kBlocks = false;
  NoBlocks blocks;

  __device__ __forceinline__ float score(float score, int, int, int, int) const { return score; }
  __device__ __forceinline__ float gradient(float, float grad, int, int, int, int) const { return grad; }
  __device__ __forceinline__ bool mask(int, int, int, int) const { return true; }
};
