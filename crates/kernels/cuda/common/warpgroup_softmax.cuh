// Softmax on a warpgroup's 64×N tile of scores in registers (layout: wgmma.cuh). Every thread holds two rows,
// r = 0 and 1 (16w+g and 16w+g+8); four neighbouring lanes share them.
#pragma once
#include "params.h"
#include "wgmma.cuh"

// A value that a lambda can be compiled for.
template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

struct RowState {
  float max[2];  // running maximum of the raw scores, the same in the four lanes of a row
  float sum[2];  // running sum of this thread's own columns; reduced over the lanes at the end
};

__device__ __forceinline__ void row_state_reset(RowState& state) {
  state.max[0] = state.max[1] = NEG_INF;
  state.sum[0] = state.sum[1] = 0.f;
}

// A thread's columns of one row lie at 0, 1, 8, 9, 16, 17, … from its first: how many of them lie before `column`.
__device__ __forceinline__ int columns_before(int column) { return column <= 0 ? 0 : 2 * (column >> 3) + min(column & 7, 2); }

// The lowest `count` bits, 0 to 32.
__device__ __forceinline__ u32 low_bits(int count) { return count <= 0 ? 0u : ~0u >> max(0, 32 - count); }

// Calls visit(i, visible) for every score. Hidden is what lies outside [row + band_lo, row + band_hi] or past the last key. `rows` are
// this thread's two query positions, `column` is the key of its first accumulator. What is visible is worked out once as a word of bits,
// which become predicates several at a time: half as many instructions as a comparison for each score.
template <int N, typename Visit>
__device__ __forceinline__ void visit_visible(const int (&rows)[2], int column, int band_lo, int band_hi, int seq_kv, Visit visit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = columns_before(min(rows[r] + band_hi, seq_kv - 1) - column + 1);
    const int begin = columns_before(rows[r] + band_lo - column);
#pragma unroll
    for (int word = 0; word < (N + 127) / 128; ++word) {
      const u32 visible = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int j = 16 * word + i / 2;
        if (j < N / 8) visit(4 * j + 2 * r + i % 2, bool(visible >> i & 1));
      }
    }
  }
}

// Hides scores.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N / 2], const int (&rows)[2], int column, int band_lo, int band_hi, int seq_kv) {
  visit_visible<N>(rows, column, band_lo, band_hi, seq_kv, [&](int i, bool visible) {
    if (!visible) s[i] = NEG_INF;
  });
}

// The same before there are scores: the product is then added to zero, or to an infinity that stays one.
template <int N>
__device__ __forceinline__ void mask_in_advance(float (&s)[N / 2], const int (&rows)[2], int column, int band_lo, int band_hi,
                                                int seq_kv) {
  visit_visible<N>(rows, column, band_lo, band_hi, seq_kv, [&](int i, bool visible) { s[i] = visible ? 0.f : NEG_INF; });
}

// Keeps ptxas from pulling a wait for products in flight up before arithmetic that should run under them, which it
// otherwise does: the wait has no operands. The branch is never taken (no arithmetic gives this NaN).
__device__ __forceinline__ void finish_before_wait(float result) {
  if (__float_as_uint(result) == 0xffffffffu) asm volatile("nanosleep.u32 20;" ::: "memory");
}

// And what should stay behind the wait from being pulled up before it: `value` then depends on an accumulator that the wait is for.
__device__ __forceinline__ void begin_after_wait(float& value, float accumulator) {
  if (__float_as_uint(accumulator) == 0xffffffffu) value = accumulator;
}

struct NoWait {
  __device__ __forceinline__ float operator()() const { return 0.f; }
};

// The largest score of each row seen so far, the same in its four lanes.
template <int N>
__device__ __forceinline__ void row_maxima(const float (&s)[N / 2], const RowState& state, float (&top)[2]) {
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
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], lanes));
}

// The same from the scores' bits as integers, for which there is a maximum of three: half the instructions. Floats that are not
// negative order like their bits, and the bits of negative ones are negative: right whenever the result is not
// negative. False where a row of this warp has seen negative scores alone.
template <int N>
__device__ __forceinline__ bool row_maxima_of_three(const float (&s)[N / 2], const RowState& state, float (&top)[2]) {
  int most[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = __float_as_int(state.max[r]);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
      most[r] = __vimax3_s32(most[r], __float_as_int(s[4 * j + 2 * r]), __float_as_int(s[4 * j + 2 * r + 1]));
  }
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int r = 0; r < 2; ++r) most[r] = max(most[r], __shfl_xor_sync(~0u, most[r], lanes));
  top[0] = __int_as_float(most[0]), top[1] = __int_as_float(most[1]);
  return __all_sync(~0u, min(most[0], most[1]) >= 0);
}

// Turns scores into unnormalised probabilities relative to the running maximum, and gives the factor by which
// everything accumulated so far shrinks; false: nothing shrinks. MASKED: a row may have no visible key yet.
// SKIP: asks whether a maximum of this warp has grown at all.
// `wait` is called after WAIT_EIGHTHS eighths of the exponentials (-1: before the maximum, or when ptxas likes) and returns an accumulator of
// the product that it waits for, or 0: what comes behind it may be mixed with the code that follows. `by_threes`: maxima as integers, of three at a time, where rows see enough keys for
// one score that is not negative.
template <int N, bool MASKED, bool SKIP = false, int WAIT_EIGHTHS = -1, typename Wait = NoWait>
__device__ __forceinline__ bool softmax_scores(float (&s)[N / 2], RowState& state, float scale_log2, float (&shrink)[2],
                                               Wait wait = Wait(), bool by_threes = false) {
  if (WAIT_EIGHTHS < 0) wait();
  float top[2];
  if (!by_threes || !row_maxima_of_three<N>(s, state, top)) row_maxima<N>(s, state, top);
  bool grows = true;
  if (SKIP) {
    const bool stays = (top[0] - state.max[0]) * scale_log2 <= 0 && (top[1] - state.max[1]) * scale_log2 <= 0;
    grows = !__all_sync(~0u, stays);
    if (!grows) top[0] = state.max[0], top[1] = state.max[1];
  }
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float safe = MASKED && top[r] == NEG_INF ? 0.f : top[r];
    shrink[r] = exp2_approx((state.max[r] - safe) * scale_log2);
    offset[r] = -safe * scale_log2;
    state.max[r] = top[r];
  }
  float sum[2][2] = {};
  float accumulator = 0.f;
#pragma unroll
  for (int j = 0; j <= N / 8; ++j) {
    if (WAIT_EIGHTHS >= 0 && j == WAIT_EIGHTHS * (N / 8) / 8) {
      finish_before_wait(j == 0 ? shrink[0] + shrink[1] : (sum[0][0] + sum[0][1]) + (sum[1][0] + sum[1][1]));
      accumulator = wait();
    }
    // Two eighths behind it ptxas may still put before the wait, which is as good; all of them, as it sometimes would, is not.
    if (WAIT_EIGHTHS >= 0 && j == (WAIT_EIGHTHS + 2) * (N / 8) / 8) {
      begin_after_wait(offset[0], accumulator);
      begin_after_wait(offset[1], accumulator);
    }
    if (j == N / 8) break;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_approx(fmaf(x, scale_log2, offset[r]));
        sum[r][e] += x;
      }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] = fmaf(state.sum[r], shrink[r], sum[r][0] + sum[r][1]);
  return grows;
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
__device__ __forceinline__ void pack_residual(const float (&s)[N / 2], const u32 (&packed)[N / 4], u32 (&residual)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float2 kept = unpack_pair(packed[i]);
    residual[i] = pack_pair(s[2 * i] - kept.x, s[2 * i + 1] - kept.y);
  }
}

__device__ __forceinline__ void reduce_row_sums(RowState& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 2);
  }
}
