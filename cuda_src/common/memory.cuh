// Loads and stores that the compiler must not split, sink or reorder, each wrapper named as its instruction.
#pragma once

#include "config.cuh"

// An address in the shared window, as ldmatrix and st.shared take it.
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void st_shared_v4(uint32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32 address, uint32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// volatile: the compiler otherwise sinks a prefetch down to its use.
__device__ __forceinline__ uint4 ld_global_v4(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// A store written in C++ of a vector whose items were just computed one by one may be split into items again.
__device__ __forceinline__ void st_global_v4(void* target, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Four floats that neighbouring lanes share: through L1.
__device__ __forceinline__ float4 ld_global_v4(const float* source) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(source));
  return v;
}

__device__ __forceinline__ void red_global_add(float* target, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(target), "f"(x) : "memory");
}
