// Warp-level tensor-core pieces (sm_80 and later): ldmatrix, mma.sync m16n8k16, cp.async,
// and the 16-bit packing shared with the warpgroup kernels.
//
// Fragment layout of mma.sync.m16n8k16 (g = lane / 4, t = lane % 4):
//   C (fp32)  c0,c1: row g,   columns 2t, 2t+1      c2,c3: row g+8, same columns
//   A (16-bit pairs) a0: row g, k 2t..   a1: row g+8, k 2t..   a2: row g, k 8+2t..   a3: row g+8, k 8+2t..
// so two neighbouring C tiles of scores, packed to 16 bits, are the A operand of the next product.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef DTYPE_BF16
#define DTYPE_BF16 0
#endif

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#if DTYPE_BF16
typedef __nv_bfloat16 half_type;
#define SDPA_DTYPE "bf16"
#else
typedef __half half_type;
#define SDPA_DTYPE "f16"
#endif

// A macro: NVRTC knows no constant expression for an infinity.
#define NEG_INF __int_as_float(0xff800000)

__device__ __forceinline__ u32 smem_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Two fp32 values rounded to nearest and packed, `lo` in the low half.
__device__ __forceinline__ u32 pack_pair(float lo, float hi) {
  u32 d;
  asm("cvt.rn." SDPA_DTYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ float2 unpack_pair(u32 pair) {
#if DTYPE_BF16
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#else
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
#endif
}

__device__ __forceinline__ bool aligned16(const void* p, long long stride_elements) {
  return ((reinterpret_cast<u64>(p) | u64(stride_elements * 2)) & 15) == 0;
}

// Eight output columns as 16 bytes, or element by element where the row is not aligned or ends early.
__device__ __forceinline__ void store_chunk(half_type* row, int column, int dim, bool aligned, uint4 bits) {
  if (aligned && column + 8 <= dim) {
    *reinterpret_cast<uint4*>(row + column) = bits;
  } else {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + j < dim) reinterpret_cast<u16*>(row)[column + j] = u16(words[j / 2] >> (16 * (j % 2)));
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." SDPA_DTYPE "." SDPA_DTYPE
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory, of which the first `valid_bytes` (0..16) are read and the rest zero-filled.
__device__ __forceinline__ void cp_async_16(u32 smem, const void* global, int valid_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8×8 matrices from registers to shared memory, the inverse of ldmatrix_x4 (sm_90).
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
