// Attention in one screen: a warp owns a query row, its lanes share the head dimension, and keys go by one
// at a time under a streaming softmax. Slow, but right for every problem its manifest promises.
#include "params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// WARPS and UNROLL are tunables, HEAD_DIM and DTYPE_BF16 come from the problem: see my_sdpa.toml.
#if DTYPE_BF16
typedef __nv_bfloat16 Element;
__device__ float widen(Element x) { return __bfloat162float(x); }
__device__ Element narrow(float x) { return __float2bfloat16(x); }
#else
typedef __half Element;
__device__ float widen(Element x) { return __half2float(x); }
__device__ Element narrow(float x) { return __float2half(x); }
#endif

constexpr int LANES = 32;
constexpr int PER_LANE = HEAD_DIM / LANES;
constexpr float LN_2 = 0.693147180559945f;

__device__ float warp_sum(float x) {
  for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// One block an SM is all that is asked for: with more in mind the compiler keeps to fewer registers, and spills at 128 columns.
extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) my_sdpa(const __grid_constant__ SdpaParams p) {
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= p.seq_q) return;  // a whole warp leaves at once, so the shuffles below stay complete

  const int head_kv = head / (p.heads_q / p.heads_kv);
  const Element* q = (const Element*)p.q + batch * p.q_stride[0] + head * p.q_stride[1] + row * p.q_stride[2];
  const Element* k = (const Element*)p.k + batch * p.k_stride[0] + head_kv * p.k_stride[1];
  const Element* v = (const Element*)p.v + batch * p.v_stride[0] + head_kv * p.v_stride[1];
  Element* o = (Element*)p.o + batch * p.o_stride[0] + head * p.o_stride[1] + row * p.o_stride[2];

  float query[PER_LANE], sums[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    query[i] = column < p.dim_qk ? widen(q[column]) * p.scale_log2 : 0.f;
    sums[i] = 0.f;
  }

  const float minus_infinity = __int_as_float(0xff800000);
  float largest = minus_infinity, total = 0.f;  // of the scores so far, in units of log2
  const int first = max(0, row + p.band_lo), last = min(p.seq_kv - 1, row + p.band_hi);
#pragma unroll UNROLL
  for (int key = first; key <= last; ++key) {
    float score = 0.f;
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * LANES;
      // Past dim_qk there may be anything, NaN included: it is not read.
      if (column < p.dim_qk) score += query[i] * widen(k[key * p.k_stride[2] + column]);
    }
    score = warp_sum(score);

    const float grown = fmaxf(largest, score);
    const float shrink = exp2f(largest - grown), weight = exp2f(score - grown);
    largest = grown;
    total = total * shrink + weight;
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * LANES;
      const float value = column < p.dim_v ? widen(v[key * p.v_stride[2] + column]) : 0.f;
      sums[i] = sums[i] * shrink + weight * value;
    }
  }

  const float inverse = total > 0.f ? 1.f / total : 0.f;  // a row that sees no key is 0
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    if (column < p.dim_v) o[column] = narrow(sums[i] * inverse);
  }
  if (p.lse && lane == 0) {
    p.lse[batch * p.lse_stride[0] + head * p.lse_stride[1] + row] =
        total > 0.f ? (largest + log2f(total)) * LN_2 : minus_infinity;
  }
}
