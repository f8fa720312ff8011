// sdpa_v1 - the scalar baseline: one fused kernel, no shared memory, no barriers.
//
// One warp owns one query row from start to finish. Its 32 lanes split the head
// dimension (lane owns columns lane, lane+32, ...), so every K and V row is read as one
// coalesced segment; a score is the sum over lanes of a partial dot product. Running
// maximum, running sum and the output row live in registers, and no other thread ever
// sees them: there is nothing to race on.
//
// Set by the manifest: DTYPE_BF16, HEAD_DIM, VALUE_DIM (multiples of 32), WARPS, KEYS_PER_STEP.
#include "copy.cuh"
#include "lse.cuh"
#include "mask.cuh"
#include "softmax.cuh"

constexpr int LANES = 32;
constexpr int QK_COLS_PER_LANE = HEAD_DIM / LANES;
constexpr int V_COLS_PER_LANE = VALUE_DIM / LANES;
static_assert(HEAD_DIM % LANES == 0 && VALUE_DIM % LANES == 0, "lanes split the columns evenly");

// This lane's columns of one row as fp32; columns past the real dimension are zero.
template <int COLS>
__device__ __forceinline__ void load_row(float (&out)[COLS], const element* row, int dim, int lane) {
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    const int col = lane + c * LANES;
    out[c] = col < dim ? to_float(row[col]) : 0.0f;
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES)
    sdpa_v1(const __grid_constant__ SdpaParams p) {
  const int lane = threadIdx.x % LANES;
  const int row = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (row >= p.seq_q) return;  // whole warps leave; no barrier waits for them
  const int head = blockIdx.y;
  const int batch = blockIdx.z;
  const int kv_head = kv_head_of(p, head);

  const element* q =
      head_of(static_cast<const element*>(p.q), p.q_stride, batch, head) + row * p.q_stride[2];
  const element* k = head_of(static_cast<const element*>(p.k), p.k_stride, batch, kv_head);
  const element* v = head_of(static_cast<const element*>(p.v), p.v_stride, batch, kv_head);

  // Scaling q once puts every score in log2 units at no cost per key.
  float q_row[QK_COLS_PER_LANE];
  load_row(q_row, q, p.dim_qk, lane);
#pragma unroll
  for (int c = 0; c < QK_COLS_PER_LANE; ++c) q_row[c] *= p.scale_log2;

  float m = NEG_INF;
  float l = 0.0f;
  float o_row[V_COLS_PER_LANE] = {};

  // The mask is a range of keys per row, so masked keys are simply not visited.
  const KeyRange keys = visible_keys(p, row);
  for (int first = keys.begin; first < keys.end; first += KEYS_PER_STEP) {
    // Several keys per step: their loads and shuffles overlap, and the row is rescaled once.
    float score[KEYS_PER_STEP];
#pragma unroll
    for (int u = 0; u < KEYS_PER_STEP; ++u) {
      score[u] = 0.0f;
      if (first + u < keys.end) {
        float k_row[QK_COLS_PER_LANE];
        load_row(k_row, k + (first + u) * p.k_stride[2], p.dim_qk, lane);
#pragma unroll
        for (int c = 0; c < QK_COLS_PER_LANE; ++c) score[u] += q_row[c] * k_row[c];
      }
    }
    float m_new = m;
#pragma unroll
    for (int u = 0; u < KEYS_PER_STEP; ++u) {
      score[u] = first + u < keys.end ? group_sum(score[u]) : NEG_INF;
      m_new = fmaxf(m_new, score[u]);
    }

    const float alpha = rescale_factor(m, m_new);
    m = m_new;
    l *= alpha;
#pragma unroll
    for (int c = 0; c < V_COLS_PER_LANE; ++c) o_row[c] *= alpha;

#pragma unroll
    for (int u = 0; u < KEYS_PER_STEP; ++u) {
      if (first + u < keys.end) {
        const float weight = exp2f(score[u] - subtrahend(m));
        l += weight;
        float v_row[V_COLS_PER_LANE];
        load_row(v_row, v + (first + u) * p.v_stride[2], p.dim_v, lane);
#pragma unroll
        for (int c = 0; c < V_COLS_PER_LANE; ++c) o_row[c] += weight * v_row[c];
      }
    }
  }

  element* o = head_of(static_cast<element*>(p.o), p.o_stride, batch, head) + row * p.o_stride[2];
  const float inverse_l = inverse_sum(l);
#pragma unroll
  for (int c = 0; c < V_COLS_PER_LANE; ++c) {
    const int col = lane + c * LANES;
    if (col < p.dim_v) o[col] = from_float<element>(o_row[c] * inverse_l);
  }
  if (p.lse != nullptr && lane == 0)
    LSE_OF(p, batch, head, row) = log_sum_exp(m, l);
}
