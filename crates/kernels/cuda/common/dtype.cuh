// The 16-bit element type of a compiled variant, its conversions, and the integers that registers and addresses are made of.
// DTYPE_BF16 comes from the manifest: 1 = bfloat16, 0 = IEEE half.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef DTYPE_BF16
#error "DTYPE_BF16 is not defined: the manifest sets it, to 1 for bf16 and to 0 for f16"
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// PTX_DTYPE: the type's name in PTX.
#if DTYPE_BF16
using element = __nv_bfloat16;
using element2 = __nv_bfloat162;
#define PTX_DTYPE "bf16"
#else
using element = __half;
using element2 = __half2;
#define PTX_DTYPE "f16"
#endif
static_assert(sizeof(element) == 2, "the 16-bit kernels count bytes as two per element");

#define NEG_INF __int_as_float(0xff800000)  // NVRTC has no INFINITY macro

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }

// Round to nearest even, the rounding the correctness gate allows for.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two at once, `x` in the low half.
__device__ __forceinline__ element2 from_float2(float x, float y) {
#if DTYPE_BF16
  return __floats2bfloat162_rn(x, y);
#else
  return __floats2half2_rn(x, y);
#endif
}

// The same in one register, as MMA operands are held.
__device__ __forceinline__ u32 pack_pair(float lo, float hi) {
  u32 d;
  asm("cvt.rn." PTX_DTYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

__device__ __forceinline__ float2 unpack_pair(u32 pair) {
#if DTYPE_BF16
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
#else
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
#endif
}

// Eight elements that travel as one 16-byte access.
struct alignas(16) Chunk8 {
  element2 pair[4];
};
static_assert(sizeof(Chunk8) == 16, "one chunk is one 16-byte access");
constexpr int ELEMENTS_PER_CHUNK = 8;

__device__ __forceinline__ void unpack(const Chunk8& chunk, float (&out)[ELEMENTS_PER_CHUNK]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = to_float2(chunk.pair[i]);
    out[2 * i] = two.x;
    out[2 * i + 1] = two.y;
  }
}
