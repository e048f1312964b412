// Loads of a stream, each wrapper named as its instruction: asked for under a predicate, zeros where it does not hold.
//
// No branch stands between such a load and its use. ptxas gives all loads that live across a branch or a loop's back
// edge one scoreboard, so that the first use waits for the newest load. The *_once loads leave L1 to what is read
// again, and bring the other half of their 128-byte line to L2.
#pragma once

#include "config.cuh"

__device__ __forceinline__ uint4 ld_once_v4(const void* source, bool wanted) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
      "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
      "@wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return v;
}

__device__ __forceinline__ uint2 ld_once_v2(const void* source, bool wanted) {
  uint2 v;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %3, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\t"
      "@wanted ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];\n\t}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return v;
}

__device__ __forceinline__ uint32 ld_once_u32(const void* source, bool wanted) {
  uint32 x;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\tmov.u32 %0, 0;\n\t"
      "@wanted ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];\n\t}"
      : "=&r"(x)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return x;
}

// Through L1: what other warps read too.
__device__ __forceinline__ uint4 ld_v4_if(const void* source, bool wanted) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %5, 0;\n\t"
      "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
      "@wanted ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return v;
}

__device__ __forceinline__ uint2 ld_v2_if(const void* source, bool wanted) {
  uint2 v;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %3, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\t"
      "@wanted ld.global.nc.v2.u32 {%0, %1}, [%2];\n\t}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return v;
}

__device__ __forceinline__ uint32 ld_u32_if(const void* source, bool wanted) {
  uint32 x;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\tmov.u32 %0, 0;\n\t"
      "@wanted ld.global.nc.u32 %0, [%1];\n\t}"
      : "=&r"(x)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return x;
}

__device__ __forceinline__ uint16 ld_u16_if(const void* source, bool wanted) {
  uint16 x;
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.u32 wanted, %2, 0;\n\tmov.u16 %0, 0;\n\t"
      "@wanted ld.global.nc.u16 %0, [%1];\n\t}"
      : "=&h"(x)
      : "l"(source), "r"(static_cast<uint32>(wanted)));
  return x;
}
