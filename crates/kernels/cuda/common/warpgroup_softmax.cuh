// Softmax on a warpgroup's 64×N tile of scores in registers (layout: wgmma.cuh). Every thread holds two rows,
// r = 0 and 1 (16w+g and 16w+g+8); four neighbouring lanes share them.
#pragma once
#include "wgmma.cuh"

struct RowState {
  float max[2];  // running maximum of the raw scores, the same in the four lanes of a row
  float sum[2];  // running sum of this thread's own columns; reduced over the lanes at the end
};

__device__ __forceinline__ void row_state_reset(RowState& state) {
  state.max[0] = state.max[1] = NEG_INF;
  state.sum[0] = state.sum[1] = 0.f;
}

// Hides what lies outside [row + band_lo, row + band_hi] or past the last key. `rows` are this thread's two
// query positions, `column` is the key of its first accumulator.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N / 2], const int (&rows)[2], int column, int band_lo,
                                            int band_hi, int seq_kv) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int first = rows[r] + band_lo - column;
    const int last = min(rows[r] + band_hi, seq_kv - 1) - column;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e < first || 8 * j + e > last) s[4 * j + 2 * r + e] = NEG_INF;
  }
}

// Turns scores into unnormalised probabilities relative to the new running maximum, and gives the factor by which
// everything accumulated so far shrinks. MASKED: a row may have no visible key yet.
template <int N, bool MASKED>
__device__ __forceinline__ void softmax_scores(float (&s)[N / 2], RowState& state, float scale_log2, float (&shrink)[2]) {
  float top[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = state.max[r], odd = s[2 * r + 1];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      even = fmaxf(even, s[4 * j + 2 * r]);
      if (j > 0) odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
    }
    top[r] = fmaxf(even, odd);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float safe = MASKED && top[r] == NEG_INF ? 0.f : top[r];
    shrink[r] = exp2_approx((state.max[r] - safe) * scale_log2);
    offset[r] = -safe * scale_log2;
    state.max[r] = top[r];
  }
  float sum[2][2] = {};
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_approx(fmaf(x, scale_log2, offset[r]));
        sum[r][e] += x;
      }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] = fmaf(state.sum[r], shrink[r], sum[r][0] + sum[r][1]);
}

template <int COUNT>
__device__ __forceinline__ void scale_rows(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) o[i] *= factor[(i / 2) % 2];
}

// Probabilities as the A operand of P · V.
template <int N>
__device__ __forceinline__ void pack_probabilities(const float (&s)[N / 2], u32 (&packed)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) packed[i] = pack_pair(s[2 * i], s[2 * i + 1]);
}

// What the rounding to 16 bits left over, for rows with so few keys that it would show in the result.
template <int N>
__device__ __forceinline__ void pack_residual(const float (&s)[N / 2], u32 (&packed)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float2 kept = unpack_pair(packed[i]);
    packed[i] = pack_pair(s[2 * i] - kept.x, s[2 * i + 1] - kept.y);
  }
}

__device__ __forceinline__ void reduce_row_sums(RowState& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 2);
  }
}
