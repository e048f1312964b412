// Tensor-core instructions and the loads of their fragments. Each wrapper is named after its instruction.
//
// mma.m16n8k8 (PTX ISA, "Matrix fragments for mma.m16n8k8"): with g = lane / 4 and t = lane % 4,
//   A (16 x 8, row):  a[0] = rows g,     columns 2t, 2t+1     a[1] = row g + 8, the same columns
//   B (8 x 8, col):   b    = rows 2t, 2t+1, column g
//   C, D (16 x 8):    c[0], c[1] = row g, columns 2t, 2t+1    c[2], c[3] = row g + 8, the same columns
// So the C fragment of one product, packed to float16, is the A fragment of the next: P needs no shuffle.
// mma.m16n8k16 (sm_80 or later) takes the A and B fragments of two such steps, one after the other. From sm_80 on both
// take bfloat16 as well, in fragments of the same layout.
//
// mma.m8n8k16 of int8 with int32 sums (PTX ISA, "Matrix fragments for mma.m8n8k16"), item i of a register in bits 8 i
// to 8 i + 7:
//   A (8 x 16, row):  a    = row g, columns 4t to 4t+3
//   B (16 x 8, col):  b    = rows 4t to 4t+3, column g
//   C, D (8 x 8):     c[0], c[1] = row g, columns 2t, 2t+1
// An int8 row of 16 items has the bytes of a float16 row of 8, so ldmatrix (not its .trans) loads these fragments too.
// Two such products, of rows 0-7 and of rows 8-15 of A, have the registers of one mma.m16n8k8.
#pragma once

#include "memory.cuh"
#include "numeric.cuh"

template <typename Scalar = float16>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32 (&a)[2], uint32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// With float16 sums, which GeForce GPUs add twice as fast: c[0] is row g, c[1] row g + 8, two columns each. The sum of
// c and eight products is rounded once, to nearest even.
__device__ __forceinline__ void mma_m16n8k8_f16(uint32 (&c)[2], const uint32 (&a)[2], uint32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Two k8 steps, a times b and next_a times next_b, in one instruction.
template <typename Scalar = float16>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32 (&a)[2], const uint32 (&next_a)[2], uint32 b,
                                             uint32 next_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(next_a[0]), "r"(next_a[1]), "r"(b), "r"(next_b));
}

#ifdef BFLOAT16
template <>
__device__ __forceinline__ void mma_m16n8k8<bfloat16>(float (&c)[4], const uint32 (&a)[2], uint32 b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&c)[4], const uint32 (&a)[2], const uint32 (&next_a)[2],
                                                       uint32 b, uint32 next_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(next_a[0]), "r"(next_a[1]), "r"(b), "r"(next_b));
}
#endif

// c += a b, exactly: int32 sums wrap around.
__device__ __forceinline__ void mma_m8n8k16_s8(int (&c)[2], uint32 a, uint32 b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a), "r"(b));
}

// Two of them with the same b and the registers of one mma.m16n8k8: a[0] and c[0..1] are rows 0-7, a[1] and c[2..3] are
// rows 8-15.
__device__ __forceinline__ void mma_m8n8k16_s8_pair(int (&c)[4], const uint32 (&a)[2], uint32 b) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(b));
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+r"(c[2]), "+r"(c[3])
               : "r"(a[1]), "r"(b));
}

// The same product with all items of its sum beginning at `c`, which takes two registers for any number of products.
__device__ __forceinline__ void mma_m8n8k16_s8_pair(int (&d)[4], const uint32 (&a)[2], uint32 b, int c) {
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %4};"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(a[0]), "r"(b), "r"(c));
  asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %4};"
               : "=r"(d[2]), "=r"(d[3])
               : "r"(a[1]), "r"(b), "r"(c));
}

// c += a b in int32 for 16 rows and 32 items (sm_80 or later): a and next_a are fragments of 16 items each, as those of
// two mma_m8n8k16_s8_pair.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&c)[4], const uint32 (&a)[2], const uint32 (&next_a)[2], uint32 b,
                                                uint32 next_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(next_a[0]), "r"(next_a[1]), "r"(b), "r"(next_b));
}

// Load kCount 8x8 matrices of 16-bit items. Lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i. On Turing
// the addresses of the other lanes must be valid and aligned too.
template <int kCount>
__device__ __forceinline__ void ldmatrix(uint32 (&r)[kCount], uint32 address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "x1, x2, x4");
  if constexpr (kCount == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  }
}

template <int kCount>
__device__ __forceinline__ void ldmatrix_trans(uint32 (&r)[kCount], uint32 address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "x1, x2, x4");
  if constexpr (kCount == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  }
}

// Transpose an 8x8 matrix of 16-bit items that is distributed over the lanes as packed C fragments are.
__device__ __forceinline__ uint32 movmatrix_trans(uint32 a) {
  uint32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// A value that the compiler cannot recompute from others, so it stays in its register.
template <typename Scalar>
__device__ __forceinline__ Scalar kept_in_register(Scalar x) {
  return __shfl_sync(kFullWarp, x, lane_index());
}
