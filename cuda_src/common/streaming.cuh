// Predicated loads of read-only data. Each wrapper is named after its instruction.
//
// A predicate needs no branch between a load and its use. ptxas gives all loads that live across a branch or a loop's
// back edge one scoreboard, so that the first use would wait for the newest load. And loads cannot move past a branch.
//
// If the predicate is false, wrappers with a reference leave it unchanged, and those with a result return zeros. The
// *_once loads do not allocate in L1. With a hint of 128 bytes L2 fetches the whole line, because neighbouring loads
// need the rest.
#pragma once

#include "config.cuh"

// The instruction with one, two or four registers. `state` is the constraint of a register: "+r" if a false predicate
// leaves it unchanged, "=&r" if `zero` clears it first. `kind` is the rest of ld.global.nc: cache hints and the type.
#define LOAD_IF_1(state, zero, kind, a)                                                                          \
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %2, 0;\n" zero "@wanted ld.global.nc" kind " %0, [%1];}" \
               : state(a)                                                                                        \
               : "l"(source), "r"(static_cast<uint32>(wanted)))
#define LOAD_IF_2(state, zero, hint, a, b)                                                         \
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %3, 0;\n" zero "@wanted ld.global.nc" hint \
               ".v2.u32 {%0, %1}, [%2];}"                                                          \
               : state(a), state(b)                                                                \
               : "l"(source), "r"(static_cast<uint32>(wanted)))
#define LOAD_IF_4(state, zero, hint, a, b, c, d)                                                   \
  asm volatile("{.reg .pred wanted; setp.ne.u32 wanted, %5, 0;\n" zero "@wanted ld.global.nc" hint \
               ".v4.u32 {%0, %1, %2, %3}, [%4];}"                                                  \
               : state(a), state(b), state(c), state(d)                                            \
               : "l"(source), "r"(static_cast<uint32>(wanted)))

#define ZERO_1 "mov.u32 %0, 0; "
#define ZERO_2 ZERO_1 "mov.u32 %1, 0; "
#define ZERO_4 ZERO_2 "mov.u32 %2, 0; mov.u32 %3, 0; "

// Load 1, 2 or 4 words.
template <int kWords>
__device__ __forceinline__ void ld_global_if(uint32 (&x)[kWords], const void* source, bool wanted) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "u32, v2, v4");
  if constexpr (kWords == 4) {
    LOAD_IF_4("+r", "", ".L2::128B", x[0], x[1], x[2], x[3]);
  } else if constexpr (kWords == 2) {
    LOAD_IF_2("+r", "", ".L2::128B", x[0], x[1]);
  } else {
    LOAD_IF_1("+r", "", ".u32", x[0]);
  }
}

__device__ __forceinline__ void ld_global_v4_if(uint4& v, const void* source, bool wanted) {
  LOAD_IF_4("+r", "", ".L2::128B", v.x, v.y, v.z, v.w);
}

__device__ __forceinline__ void ld_global_u16_if(uint32& x, const void* source, bool wanted) {
  LOAD_IF_1("+r", "", ".u16", x);
}

__device__ __forceinline__ uint4 ld_once_v4(const void* source, bool wanted) {
  uint4 v;
  LOAD_IF_4("=&r", ZERO_4, ".L1::no_allocate.L2::128B", v.x, v.y, v.z, v.w);
  return v;
}

__device__ __forceinline__ uint2 ld_once_v2(const void* source, bool wanted) {
  uint2 v;
  LOAD_IF_2("=&r", ZERO_2, ".L1::no_allocate.L2::128B", v.x, v.y);
  return v;
}

__device__ __forceinline__ uint32 ld_once_u32(const void* source, bool wanted) {
  uint32 x;
  LOAD_IF_1("=&r", ZERO_1, ".L1::no_allocate.L2::128B.u32", x);
  return x;
}

// Through L1, for data that other warps read too.
__device__ __forceinline__ uint4 ld_v4_if(const void* source, bool wanted) {
  uint4 v;
  LOAD_IF_4("=&r", ZERO_4, "", v.x, v.y, v.z, v.w);
  return v;
}

__device__ __forceinline__ uint2 ld_v2_if(const void* source, bool wanted) {
  uint2 v;
  LOAD_IF_2("=&r", ZERO_2, "", v.x, v.y);
  return v;
}

__device__ __forceinline__ uint32 ld_u32_if(const void* source, bool wanted) {
  uint32 x;
  LOAD_IF_1("=&r", ZERO_1, ".u32", x);
  return x;
}

__device__ __forceinline__ uint16 ld_u16_if(const void* source, bool wanted) {
  uint16 x;
  LOAD_IF_1("=&h", "mov.u16 %0, 0; ", ".u16", x);
  return x;
}

#undef LOAD_IF_1
#undef LOAD_IF_2
#undef LOAD_IF_4
#undef ZERO_1
#undef ZERO_2
#undef ZERO_4
