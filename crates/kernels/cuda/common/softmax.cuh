// Streaming softmax. Scores are kept in log2 units (already multiplied by
// scale * log2(e)), so one exp2 replaces exp, and per row two numbers are carried:
// the running maximum m and the running sum l of exp2(score - m).
#pragma once

#define NEGATIVE_INFINITY __int_as_float(0xff800000)  // NVRTC has no INFINITY macro
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned WHOLE_WARP = 0xffffffffu;

// 2^x in one instruction. Results below 2^-126 become 0, where exp2f spends three more
// instructions on denormals; a weight that small is nothing beside the row's largest.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What to subtract from a score. A row that has seen no key yet has m = -inf, and
// -inf - (-inf) is NaN; subtracting 0 instead leaves exp2(-inf) = 0, as it should be.
__device__ __forceinline__ float subtrahend(float m) { return m == NEGATIVE_INFINITY ? 0.0f : m; }

// The factor that moves sums taken relative to `m_old` to the new maximum.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new) {
  return exp2f(m_old - subtrahend(m_new));
}

// What a row's accumulator is multiplied with at the end; 0 for a row without keys.
__device__ __forceinline__ float inverse_sum(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }

// Natural logarithm of the softmax denominator; -inf for a row without keys.
__device__ __forceinline__ float log_sum_exp(float m, float l) {
  return l == 0.0f ? NEGATIVE_INFINITY : (m + log2f(l)) * LN_2;
}

// Butterfly reductions over aligned groups of WIDTH lanes; every lane gets the result.
template <int WIDTH = 32>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, offset));
  return x;
}

template <int WIDTH = 32>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(WHOLE_WARP, x, offset);
  return x;
}
