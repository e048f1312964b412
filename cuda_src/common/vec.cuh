// Loads and stores of kItems contiguous items by one thread in one instruction.
//
// VEC is 16 bytes of items if every row of the arrays is 16-byte aligned, otherwise 1. The code is the same.
#pragma once

#include "memory.cuh"
#include "numeric.cuh"

template <typename Scalar, int kItems>
struct alignas(sizeof(Scalar) * kItems) Vec {
  static_assert(sizeof(Scalar) * kItems <= kVectorBytes, "wider than one thread can load at once");
  Scalar item[kItems];
};

// The word of kBytes bytes, up to 16, which one instruction loads.
template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using Type = unsigned char;
};
template <>
struct Word<2> {
  using Type = uint16;
};
template <>
struct Word<4> {
  using Type = uint32;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};
template <typename Items>
using WordsOf = typename Word<sizeof(Items)>::Type;

// Convert loaded words to float32. Halves are split in a register. Without this, the compiler splits a conditionally
// loaded word before it selects, with two byte permutations per item. That was 83 of the 600 instructions of layer
// norm's forward at a width of 2048, and 71 instead of 64 registers at 768 (float16, sm_75, NVRTC 12.9, 2026-11-24).
template <typename Scalar, int kItems>
__device__ __forceinline__ void unpack(float (&values)[kItems], const WordsOf<Vec<Scalar, kItems>>& words) {
  if constexpr (sizeof(Scalar) == sizeof(uint16) && kItems > 1) {
#pragma unroll
    for (int i = 0; i < kItems; i += 2) {
      uint16 low, high;
      asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(reinterpret_cast<const uint32*>(&words)[i / 2]));
      values[i] = to_float(*reinterpret_cast<const Scalar*>(&low));
      values[i + 1] = to_float(*reinterpret_cast<const Scalar*>(&high));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kItems; i++) values[i] = to_float(reinterpret_cast<const Scalar*>(&words)[i]);
  }
}

// Load items as float32, at most 16 bytes at a time. `source` must be aligned to the smaller of 16 bytes and
// kItems * sizeof(Scalar).
template <int kItems, typename Scalar>
__device__ __forceinline__ void load_vec(float (&values)[kItems], const Scalar* source) {
  constexpr int kPiece = kItems * sizeof(Scalar) <= kVectorBytes ? kItems : kVectorBytes / sizeof(Scalar);
  static_assert(kItems % kPiece == 0, "whole pieces");
#pragma unroll
  for (int first = 0; first < kItems; first += kPiece) {
    const Vec<Scalar, kPiece> loaded = *reinterpret_cast<const Vec<Scalar, kPiece>*>(source + first);
#pragma unroll
    for (int i = 0; i < kPiece; i++) values[first + i] = to_float(loaded.item[i]);
  }
}

// Round to Scalar and store to global memory, at most 16 bytes at a time. `target` must be aligned to the smaller of
// 16 bytes and kItems * sizeof(Scalar).
template <int kItems, typename Scalar>
__device__ __forceinline__ void store_vec(Scalar* target, const float (&values)[kItems]) {
  constexpr int kPiece = kItems * sizeof(Scalar) <= kVectorBytes ? kItems : kVectorBytes / sizeof(Scalar);
  static_assert(kItems % kPiece == 0, "whole pieces");
#pragma unroll
  for (int first = 0; first < kItems; first += kPiece) {
    Vec<Scalar, kPiece> rounded;
#pragma unroll
    for (int i = 0; i < kPiece; i++) rounded.item[i] = from_float<Scalar>(values[first + i]);
    if constexpr (sizeof(rounded) == kVectorBytes) {
      st_global_v4(target + first, *reinterpret_cast<const uint4*>(&rounded));
    } else if constexpr (sizeof(rounded) == kVectorBytes / 2) {
      st_global_v2(target + first, *reinterpret_cast<const uint2*>(&rounded));
    } else {
      *reinterpret_cast<Vec<Scalar, kPiece>*>(target + first) = rounded;
    }
  }
}
