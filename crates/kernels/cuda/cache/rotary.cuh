// cache_write: elements, and their rotary embedding. Every multiplication and addition is rounded by itself, as on a CPU: both give the
// same bits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cache_params.h"

#ifndef ELEMENT
#error "ELEMENT is not defined: 0 for f32, 1 for f16, 2 for bf16, 3 for codes of 8 bits"
#endif

namespace {

#if ELEMENT == 0
using element = float;
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float narrowed(float x) { return x; }
#elif ELEMENT == 1
using element = __half;
__device__ __forceinline__ float widened(__half x) { return __half2float(x); }
__device__ __forceinline__ __half narrowed(float x) { return __float2half_rn(x); }
#elif ELEMENT == 2
using element = __nv_bfloat16;
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ __nv_bfloat16 narrowed(float x) { return __float2bfloat16_rn(x); }
#else
using element = unsigned char;  // copied, never turned
#endif

__device__ __forceinline__ float angle(const CacheParams& p, const void* table, long long at) {
  switch (p.angle_type) {
    case CACHE_ANGLE_F16: return __half2float(static_cast<const __half*>(table)[at]);
    case CACHE_ANGLE_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(table)[at]);
    default: return static_cast<const float*>(table)[at];
  }
}

// Where the rows of a token's heads begin, and the step from head to head.
template <typename T>
struct Heads {
  T* first;
  long long stride;
};

// All heads of a token, by all threads of the CTA.
__device__ __forceinline__ void copy_heads(Heads<const element> from, Heads<element> to, int heads, int dim) {
  constexpr int PER_CHUNK = 16 / sizeof(element);
  const unsigned long long places = reinterpret_cast<unsigned long long>(from.first) | reinterpret_cast<unsigned long long>(to.first) |
                                    (from.stride | to.stride | dim) * sizeof(element);
  const bool whole = (places & 15) == 0;
  const int columns = whole ? dim / PER_CHUNK : dim;
  for (int i = threadIdx.x; i < heads * columns; i += blockDim.x) {
    const int head = i / columns, column = i - head * columns;
    const element* source = from.first + head * from.stride;
    element* target = to.first + head * to.stride;
    if (whole)
      reinterpret_cast<uint4*>(target)[column] = reinterpret_cast<const uint4*>(source)[column];
    else
      target[column] = source[column];
  }
}

#if ELEMENT < 3
// The same, turned by the angles of a position that has some.
__device__ __forceinline__ void turn_heads(const CacheParams& p, Heads<const element> from, Heads<element> to, int heads, int dim,
                                           int position) {
  const int rest = dim - 2 * p.columns;  // elements that are not turned
  const int steps = p.columns + rest;
  for (int i = threadIdx.x; i < heads * steps; i += blockDim.x) {
    const int head = i / steps, step = i - head * steps;
    const element* source = from.first + head * from.stride;
    element* target = to.first + head * to.stride;
    if (step >= p.columns) {
      const int column = step + p.columns;
      target[column] = source[column];
      continue;
    }
    const float cos = angle(p, p.cos, position * p.cos_stride + step), sin = angle(p, p.sin, position * p.sin_stride + step);
    const int first = p.interleaved ? 2 * step : step, second = p.interleaved ? 2 * step + 1 : step + p.columns;
    const float a = widened(source[first]), b = widened(source[second]);
    target[first] = narrowed(__fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin)));
    target[second] = narrowed(__fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin)));
  }
}
#endif

}  // namespace
