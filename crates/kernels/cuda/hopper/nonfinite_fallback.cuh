// One row of attention by the four lanes that own it, straight from global memory: the way out where a shortcut has met numbers that
// it cannot take. Slow, and never run on ordinary inputs.
#pragma once
#include "lse.cuh"
#include "softmax.cuh"

// Writes columns [first, last) of O, and the LSE where `lse` is a place for it, unless a visible score is NaN or +infinity: what
// is there already, NaN, is then right.
__device__ __noinline__ void nonfinite_fallback(const SdpaParams& p, int batch, int head, int head_kv, int row, int first, int last,
                                               element* o, float* lse) {
  constexpr int AT_ONCE = 4;  // columns of one pass over the keys
  const element* q = static_cast<const element*>(p.q) + batch * p.q_stride[0] + head * p.q_stride[1] + row * p.q_stride[2];
  const element* k = static_cast<const element*>(p.k) + batch * p.k_stride[0] + head_kv * p.k_stride[1];
  const element* v = static_cast<const element*>(p.v) + batch * p.v_stride[0] + head_kv * p.v_stride[1];
  const int key_first = max(0, row + p.band_lo), key_last = min(p.seq_kv - 1, row + p.band_hi);
  auto score = [&](int key) {
    float sum = 0.f;
#pragma unroll 1
    for (int d = 0; d < p.dim_qk; ++d) sum = fmaf(float(q[d]), float(k[key * p.k_stride[2] + d]), sum);
    return sum;
  };
  float top = NEG_INF;
#pragma unroll 1
  for (int key = key_first; key <= key_last; ++key) {
    const float s = score(key);
    if (!(s < -NEG_INF)) return;
    top = fmaxf(top, s);
  }
  const float safe = top == NEG_INF ? 0.f : top;
  float weights = 0.f;
#pragma unroll 1
  for (int column = first + AT_ONCE * int(threadIdx.x % 4); column < last; column += 4 * AT_ONCE) {
    float sum[AT_ONCE] = {};
    weights = 0.f;
#pragma unroll 1
    for (int key = key_first; key <= key_last; ++key) {
      const float weight = exp2_approx((score(key) - safe) * p.scale_log2);
      weights += weight;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (column + i < last) sum[i] = fmaf(weight, float(v[key * p.v_stride[2] + column + i]), sum[i]);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (column + i < last) o[column + i] = element(weights > 0.f ? sum[i] / weights : 0.f);
  }
  if (lse && threadIdx.x % 4 == 0) *lse = log_sum_exp(top, weights, p.scale);
}
