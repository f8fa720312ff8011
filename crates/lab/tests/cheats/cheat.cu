// Kernels that cheat: each is right when it is checked, or only looks fast. Test fixtures: the lab must turn every one away.
//
// One warp owns a query row, as in the plainest kernels. CHEAT, set by the manifests, says what it does besides.
#include "params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { HONEST, ZEROS, COPIES_V, CACHED_BY_POINTER, SKIPS_AFTER_WARM_UP, RIGHT_AT_FIRST, CHANGES_INPUTS, ONE_CALL_OF_THREE, WRITES_ASTRAY, TRUSTS_FINISHED_OUTPUTS };

#if DTYPE_BF16
typedef __nv_bfloat16 Element;
__device__ float widen(Element x) { return __bfloat162float(x); }
__device__ Element narrow(float x) { return __float2bfloat16(x); }
#else
typedef __half Element;
__device__ float widen(Element x) { return __half2float(x); }
__device__ Element narrow(float x) { return __float2half(x); }
#endif

constexpr int LANES = 32, WARPS = 4, PER_LANE = HEAD_DIM / LANES;
constexpr float LN_2 = 0.693147180559945f;

// What a cheat remembers from launch to launch.
__device__ unsigned blocks_so_far;
constexpr int PLACES = 61, PLACE_ELEMENTS = 1 << 15;
__device__ const void* kept_for[PLACES];
__device__ unsigned kept_by[PLACES];
__device__ Element kept[PLACES][PLACE_ELEMENTS];

__device__ float warp_sum(float x) {
  for (int distance = LANES / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// Which launch this is, counted from 0: launches follow each other, so their blocks come in whole portions.
__device__ unsigned launch_number() {
  __shared__ unsigned number;
  if (threadIdx.x == 0) number = atomicAdd(&blocks_so_far, 1u) / (gridDim.x * gridDim.y * gridDim.z);
  __syncthreads();
  return number;
}

extern "C" __global__ void __launch_bounds__(WARPS* LANES) cheat(const __grid_constant__ SdpaParams p) {
  const unsigned launch = launch_number();
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (row >= p.seq_q) return;

  const int head_kv = head / (p.heads_q / p.heads_kv);
  Element* q = (Element*)p.q + batch * p.q_stride[0] + head * p.q_stride[1] + row * p.q_stride[2];
  const Element* k = (const Element*)p.k + batch * p.k_stride[0] + head_kv * p.k_stride[1];
  const Element* v = (const Element*)p.v + batch * p.v_stride[0] + head_kv * p.v_stride[1];
  Element* o = (Element*)p.o + batch * p.o_stride[0] + head * p.o_stride[1] + row * p.o_stride[2];

  const int place = (int)(((unsigned long long)p.q >> 8) % PLACES);
  const int kept_at = ((batch * p.heads_q + head) * p.seq_q + row) * p.dim_v;

  if (CHEAT == ZEROS || CHEAT == COPIES_V) {
    for (int c = lane; c < p.dim_v; c += LANES)
      o[c] = CHEAT == ZEROS ? narrow(0.f) : v[(row % p.seq_kv) * p.v_stride[2] + c];
    return;
  }
  if (CHEAT == SKIPS_AFTER_WARM_UP && launch > 60) return;
  if (CHEAT == ONE_CALL_OF_THREE && launch % 3 != 0) return;
  if (CHEAT == TRUSTS_FINISHED_OUTPUTS && isfinite(widen(o[0]))) return;
  if (CHEAT == CACHED_BY_POINTER && kept_for[place] == p.q && kept_by[place] < launch) {
    for (int c = lane; c < p.dim_v; c += LANES) o[c] = kept[place][kept_at + c];
    return;
  }

  float query[PER_LANE], sums[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    query[i] = column < p.dim_qk ? widen(q[column]) * p.scale_log2 : 0.f;
    sums[i] = 0.f;
  }
  const float minus_infinity = __int_as_float(0xff800000);
  float largest = minus_infinity, total = 0.f;
  const int first = max(0, row + p.band_lo), last = min(p.seq_kv - 1, row + p.band_hi);
  for (int key = first; key <= last; ++key) {
    float score = 0.f;
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * LANES;
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
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    if (column >= p.dim_v) continue;
    const float spoiled = CHEAT == RIGHT_AT_FIRST && launch > 20 && row == 0 ? 0.25f : 0.f;
    o[column] = narrow(sums[i] * inverse + spoiled);
    if (CHEAT == CACHED_BY_POINTER && kept_at + column < PLACE_ELEMENTS) kept[place][kept_at + column] = o[column];
  }
  if (CHEAT == CACHED_BY_POINTER && lane == 0) {
    kept_for[place] = p.q;
    kept_by[place] = launch;
  }
  // Nobody else reads this row of Q.
  if (CHEAT == CHANGES_INPUTS && launch > 10 && row == 1 && lane == 0) q[0] = narrow(0.f);
  if (CHEAT == WRITES_ASTRAY && launch > 10 && row == 1 && lane == 0) o[p.dim_v + 1] = narrow(1.f);
  if (p.lse && lane == 0) {
    p.lse[batch * p.lse_stride[0] + head * p.lse_stride[1] + row] =
        total > 0.f ? (largest + log2f(total)) * LN_2 : minus_infinity;
  }
}
