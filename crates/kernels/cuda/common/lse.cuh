// The log-sum-exp of a row: the natural logarithm of its softmax denominator, -inf for a row without keys.
#pragma once
#include "dtype.cuh"
#include "params.h"

constexpr float LN_2 = 0.6931471805599453f;

// From a maximum in log2 units.
__device__ __forceinline__ float log_sum_exp(float m, float l) { return l == 0.0f ? NEG_INF : (m + log2f(l)) * LN_2; }

// From the maximum of the raw scores, to be multiplied by `scale`.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale) {
  return sum > 0.f ? fmaf(max, scale, __logf(sum)) : NEG_INF;
}

// A row's place in p.lse; a sum as `row` is added term by term. A macro, since behind a function call, inlined as it is, the kernels get another register allocation.
#define LSE_OF(p, batch, head, row) (p).lse[(batch) * (p).lse_stride[0] + (head) * (p).lse_stride[1] + row]
