// Loads and stores that the compiler must not split, sink or reorder. Each wrapper is named after its instruction.
#pragma once

#include "config.cuh"

// The dynamic shared memory of a CTA, as the kernel's buffers.
template <typename Smem>
__device__ __forceinline__ Smem& dynamic_shared() {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  return *reinterpret_cast<Smem*>(shared_bytes);
}

// An address in the shared window, for ldmatrix and st.shared.
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void st_shared_v4(uint32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_v2(uint32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32 address, uint32 x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Load 1, 2 or 4 floats; the address is a multiple of their size.
template <int kItems>
__device__ __forceinline__ void ld_shared(float (&x)[kItems], uint32 address) {
  static_assert(kItems == 1 || kItems == 2 || kItems == 4, "v1, v2, v4");
  if constexpr (kItems == 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kItems == 2) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(address) : "memory");
  }
}

template <int kItems>
__device__ __forceinline__ void st_shared(uint32 address, const float (&x)[kItems]) {
  static_assert(kItems == 1 || kItems == 2 || kItems == 4, "v1, v2, v4");
  if constexpr (kItems == 4) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
  } else if constexpr (kItems == 2) {
    st_shared_v2(address, x[0], x[1]);
  } else {
    st_shared_u32(address, __float_as_uint(x[0]));
  }
}

// volatile: the compiler otherwise sinks a prefetch down to its use.
__device__ __forceinline__ uint4 ld_global_v4(const void* source) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(source));
  return v;
}

// Copies of 16 bytes from global to shared memory that pass no register (sm_80 or later; PTX ISA, "cp.async"). A thread
// commits those it issued as a group, and waits until at most kPending of its latest groups are under way; other
// threads see the bytes after a barrier that follows the wait. Where `exists` is false nothing is read, and zeros come.
__device__ __forceinline__ void cp_async_16(uint32 to_s, const void* from_g) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_s), "l"(from_g) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32 to_s, const void* from_g, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to_s), "l"(from_g), "r"(exists ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

constexpr int kLineBytes = 128;  // of a cache

__device__ __forceinline__ void prefetch_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// For lines that neighbouring threads read entirely: L2 fetches the line's 128 bytes.
__device__ __forceinline__ uint4 ld_global_128b_v4(const void* source) {
  uint4 v;
  asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// For read-only data that is read once: L1 does not keep it, and L2 fetches the line's 128 bytes.
__device__ __forceinline__ uint4 ld_global_stream_v4(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// The same for 1, 2 or 4 words of short rows: L2 fetches 64 bytes, the least that memory transfers.
template <int kWords>
__device__ __forceinline__ void ld_global_stream(uint32 (&x)[kWords], const void* source) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "u32, v2, v4");
  if constexpr (kWords == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::64B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(source));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::64B.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(source));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.L2::64B.u32 %0, [%1];" : "=r"(x[0]) : "l"(source));
  }
}

__device__ __forceinline__ uint2 ld_global_v2(const void* source) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source));
  return v;
}

__device__ __forceinline__ uint32 ld_global_u32(const void* source) {
  uint32 x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(source));
  return x;
}

// A vector store in C++ may be split into stores of single items if the items were just computed one by one.
__device__ __forceinline__ void st_global_v4(void* target, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void st_global_v2(void* target, uint2 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(target), "r"(v.x), "r"(v.y) : "memory");
}

// Load four floats through L1, because neighbouring lanes read the same.
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

// c + a * b in one instruction. For int64 factors that fit 32 bits the compiler emits four.
__device__ __forceinline__ int64 mad_wide(int a, int b, int64 c) {
  int64 d;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
  return d;
}

__device__ __forceinline__ int64 mad_wide(uint32 a, uint32 b, int64 c) {
  int64 d;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
  return d;
}

// A value from which the compiler computes nothing before the loop that uses it, so that rarely executed code does not
// use registers throughout the loop.
__device__ __forceinline__ int not_hoisted(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
