// Kernels that cheat: each is right when it is checked, or only looks fast. Test fixtures: the lab must turn every one away.
//
// One warp owns a query row, as in the plainest kernels. CHEAT, set by the manifests, says what it does besides.
#include "params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum { HONEST, ZEROS, COPIES_V, CACHED_BY_POINTER, SKIPS_AFTER_WARM_UP, RIGHT_AT_FIRST, CHANGES_INPUTS, ONE_CALL_OF_THREE, WRITES_ASTRAY, TRUSTS_FINISHED_OUTPUTS,
  MEAN_OF_V, LOW_PRECISION, CACHED_BY_CONTENT, BATCHED, READS_PAST_SHARED, KEEPS_L2, WRITES_NOTHING };

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
constexpr bool KEEPS = CHEAT == CACHED_BY_POINTER || CHEAT == CACHED_BY_CONTENT;
constexpr float LN_2 = 0.693147180559945f;

// What a cheat remembers from launch to launch.
__device__ unsigned blocks_so_far;
constexpr int PLACES = 61, PLACE_ELEMENTS = 1 << 16;
__device__ const void* kept_for[PLACES];
__device__ unsigned kept_by[PLACES];
__device__ Element kept[PLACES][PLACE_ELEMENTS];
__device__ unsigned long long kept_content[PLACES];
constexpr int CALLS = 128;
__device__ SdpaParams seen[CALLS];
__device__ unsigned seen_by[CALLS], seen_count;

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

// A fingerprint of the inputs: some elements of each.
__device__ unsigned long long content(const SdpaParams& p, int lane) {
  unsigned long long sum = 0;
  for (int i = 0; i < 4; ++i) {
    const int at = (lane * 4 + i) * 37;
    const unsigned short* tensors[3] = {(const unsigned short*)p.q, (const unsigned short*)p.k, (const unsigned short*)p.v};
    const long long rows[3] = {(at % p.seq_q) * p.q_stride[2], (at % p.seq_kv) * p.k_stride[2], (at % p.seq_kv) * p.v_stride[2]};
    for (int t = 0; t < 3; ++t) sum = sum * 1000003u + tensors[t][rows[t] + at % (t == 2 ? p.dim_v : p.dim_qk)];
  }
  for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  return sum | 1;
}

// A load that asks L2 to keep the line before all others.
__device__ Element keep(const Element* from) {
#if CHEAT == 15
  unsigned long long policy;
  unsigned short bits;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("ld.global.L2::cache_hint.b16 %0, [%1], %2;" : "=h"(bits) : "l"(from), "l"(policy));
  return *(const Element*)&bits;
#else
  return *from;
#endif
}

// What a type of three bits of mantissa would keep of a number.
__device__ float coarse(float x) { return CHEAT == LOW_PRECISION ? __int_as_float(__float_as_int(x) & 0xfff00000) : x; }

__device__ void attend_row(const SdpaParams& p, int row, int head, int batch, int lane, unsigned launch);

extern "C" __global__ void __launch_bounds__(WARPS* LANES) cheat(const __grid_constant__ SdpaParams p) {
  const unsigned launch = launch_number();
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  const int head = blockIdx.y, batch = blockIdx.z;
  if (CHEAT == BATCHED) {
    // Who has the lowest output does the work of all that came before it; the others do nothing.
    const unsigned count = seen_count;
    int own = -1, leader = -1;
    for (int i = 0; i < (int)count; ++i) {
      if (seen_by[i] >= launch) continue;
      if (seen[i].o == p.o) own = i;
      if (leader < 0 || seen[i].o < seen[leader].o) leader = i;
    }
    if (own < 0 && threadIdx.x == 0 && blockIdx.x == 0 && head == 0 && batch == 0 && count < CALLS) {
      seen[count] = p;
      seen_by[count] = launch;
      __threadfence();
      seen_count = count + 1;
    }
    if (own >= 0 && leader != own) return;
    for (int i = 0; own >= 0 && i < (int)count; ++i)
      if (i != own && seen_by[i] < launch && row < seen[i].seq_q) attend_row(seen[i], row, head, batch, lane, launch);
  }
  if (row >= p.seq_q || CHEAT == WRITES_NOTHING) return;
  attend_row(p, row, head, batch, lane, launch);
}

__device__ void attend_row(const SdpaParams& p, int row, int head, int batch, int lane, unsigned launch) {
  const int head_kv = head / (p.heads_q / p.heads_kv);
  Element* q = (Element*)p.q + batch * p.q_stride[0] + head * p.q_stride[1] + row * p.q_stride[2];
  const Element* k = (const Element*)p.k + batch * p.k_stride[0] + head_kv * p.k_stride[1];
  const Element* v = (const Element*)p.v + batch * p.v_stride[0] + head_kv * p.v_stride[1];
  Element* o = (Element*)p.o + batch * p.o_stride[0] + head * p.o_stride[1] + row * p.o_stride[2];

  const unsigned long long fingerprint = CHEAT == CACHED_BY_CONTENT ? content(p, lane) : 0;
  const int place = (int)((CHEAT == CACHED_BY_CONTENT ? fingerprint : (unsigned long long)p.q >> 8) % PLACES);
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

  if (CHEAT == CACHED_BY_CONTENT && kept_content[place] == fingerprint && kept_by[place] < launch) {
    for (int c = lane; c < p.dim_v; c += LANES) o[c] = kept[place][kept_at + c];
    return;
  }

  // One element of what lies behind the block's shared memory, which may be anything.
  __shared__ float scratch[LANES];
  if (CHEAT == READS_PAST_SHARED) {
    scratch[lane] = 0.f;
    __syncwarp();
  }
  const float garbage = CHEAT == READS_PAST_SHARED ? ((volatile float*)scratch)[LANES + row * LANES + lane] : 0.f;

  float query[PER_LANE], sums[PER_LANE];
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    query[i] = column < p.dim_qk ? coarse(widen(q[column])) * p.scale_log2 : 0.f;
    sums[i] = isfinite(garbage) ? 0.f * garbage : 0.f;
  }
  const float minus_infinity = __int_as_float(0xff800000);
  float largest = minus_infinity, total = 0.f;
  const int first = max(0, row + p.band_lo), last = min(p.seq_kv - 1, row + p.band_hi);
  for (int key = first; key <= last; ++key) {
    float score = 0.f;
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * LANES;
      if (column < p.dim_qk) score += query[i] * coarse(widen(keep(k + key * p.k_stride[2] + column)));
    }
    score = CHEAT == MEAN_OF_V ? 0.f : warp_sum(score);
    const float grown = fmaxf(largest, score);
    const float shrink = exp2f(largest - grown), weight = exp2f(score - grown);
    largest = grown;
    total = total * shrink + weight;
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = lane + i * LANES;
      const float value = column < p.dim_v ? coarse(widen(keep(v + key * p.v_stride[2] + column))) : 0.f;
      sums[i] = sums[i] * shrink + weight * value;
    }
  }
  const float inverse = total > 0.f ? 1.f / total : 0.f;
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = lane + i * LANES;
    if (column >= p.dim_v) continue;
    const float spoiled = CHEAT == RIGHT_AT_FIRST && launch > 20 && row == 0 ? 0.25f : 0.f;
    o[column] = narrow(sums[i] * inverse + spoiled);
    if (KEEPS && kept_at + column < PLACE_ELEMENTS) kept[place][kept_at + column] = o[column];
  }
  if (KEEPS && lane == 0) {
    kept_for[place] = p.q;
    kept_content[place] = fingerprint;
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
