// 8-bit codes to halves, two at a time and without rounding: what a code stands for is that half times `CODE_FACTOR` times its scale.
#pragma once
#include "dtype.cuh"

namespace {

// u8 codes lie around 128, and 127 of them stand for 448; i8 codes stand for themselves.
constexpr float CODE_FACTOR = KV_CODES == 2 ? 448.f / 127.f : 1.f;

// The same codes around 128: with its sign turned i8 is what u8 is.
__device__ __forceinline__ u32 around_128(u32 codes) { return KV_CODES == 3 ? codes ^ 0x80808080u : codes; }

// The two codes in the low bytes of `pair`, which lie around 128.
__device__ __forceinline__ u32 halves_around_128(u32 pair) {
  // Under the exponent of 1024 a byte is the half 1024 + code.
  u32 halves;
  const u32 shifted = __byte_perm(pair, 0x64646464u, 0x4140);
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(shifted), "r"(0x64806480u));
  return halves;
}

// The two codes in the low bytes of `pair`.
__device__ __forceinline__ u32 halves_of_low_codes(u32 pair) {
  u32 halves;
#if KV_CODES >= 2
  halves = halves_around_128(around_128(pair));
#elif __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(halves) : "r"(pair));
#else
  // The bits of exponent and mantissa, one to the right, are the half 2^-8 times the number; its largest code is no number.
  const u32 placed = __byte_perm(pair, 0, 0x1404);
  const u32 magnitude = placed & 0x7f007f00u;
  const u32 small = magnitude >> 1 | (placed & 0x80008000u);
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5c005c00u));
  if ((magnitude & 0x7f000000u) == 0x7f000000u) halves |= 0x7fff0000u;
  if ((magnitude & 0x7f00u) == 0x7f00u) halves |= 0x7fffu;
#endif
  return halves;
}
// And those in its high bytes.
__device__ __forceinline__ u32 halves_of_high_codes(u32 pair) {
#if KV_CODES == 1 && __CUDA_ARCH__ >= 890
  u32 halves;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(halves) : "r"(pair));
  return halves;
#elif KV_CODES >= 2
  return halves_around_128(around_128(pair) >> 16);
#else
  return halves_of_low_codes(pair >> 16);
#endif
}

__device__ __forceinline__ u32 pack_halves(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

}  // namespace
