// Warp-level tensor-core pieces (sm_80 and later): ldmatrix, mma.sync m16n8k16; stmatrix on sm_90.
//
// Accumulator layout, of mma.sync and of wgmma (g = lane / 4, t = lane % 4, w = warp in its warpgroup, 0 for mma.sync): accumulators
// 4j and 4j+1 hold row 16w+g, columns 8j+2t and 8j+2t+1; 4j+2 and 4j+3 the same columns of row 16w+g+8.
// A (16-bit pairs) a0: row g, k 2t..   a1: row g+8, k 2t..   a2: row g, k 8+2t..   a3: row g+8, k 8+2t..
// so eight neighbouring accumulators of scores, packed to 16 bits, are the A operand of a k16 step of PV.
#pragma once
#include "dtype.cuh"

// Four 8×8 matrices of 16-bit elements; lane i passes the address of row i%8 of matrix i/8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a · b for one 16×8 tile, b given as its two k-halves.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX_DTYPE "." PTX_DTYPE
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of halves, whatever the element type.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// tf32 is an f32 of which an MMA ignores the low 13 bits.
constexpr u32 TF32_BITS = 0xffffe000u;

__device__ __forceinline__ u32 round_to_tf32(float x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits & TF32_BITS;
}

// c += a · b for one 16×8 tile of tf32. A (g and t as above) a0: row g, k t   a1: row g+8, k t   a2: row g, k t+4   a3: row g+8, k t+4;
// B b0: k t, column g   b1: k t+4, column g.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8×8 matrices from registers to shared memory, the inverse of ldmatrix_x4 (sm_90).
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
