// Streaming softmax. Per row two numbers are carried: the running maximum m of the scores and the running sum l of
// exp2(score - m), both in log2 units. First what works on single rows, then what works on MMA accumulators.
#pragma once
#include "dtype.cuh"

constexpr u32 WHOLE_WARP = 0xffffffffu;

// 2^x in one instruction. Results below 2^-126 become 0, where exp2f spends three more
// instructions on denormals; a weight that small is nothing beside the row's largest.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float max_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// What to subtract from a score. A row that has seen no key yet has m = -inf, and
// -inf - (-inf) is NaN; subtracting 0 instead leaves exp2(-inf) = 0, as it should be.
__device__ __forceinline__ float subtrahend(float m) { return m == NEG_INF ? 0.0f : m; }

// The factor that moves sums taken relative to `m_old` to the new maximum.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new) {
  return exp2f(m_old - subtrahend(m_new));
}

// What a row's accumulator is multiplied with at the end; 0 for a row without keys.
__device__ __forceinline__ float inverse_sum(float l) { return l == 0.0f ? 0.0f : 1.0f / l; }

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

// One row, its maximum in log2 units.
struct RowState {
  float m = NEG_INF;
  float l = 0.0f;
};

// --------------------------------------- 64×N or 16×N scores in MMA accumulators (layout: mma.cuh)

// A thread holds two rows, r = 0 and 1, which it shares with three neighbouring lanes. Scores are raw here: the softmax multiplies
// `scale_log2` (score.cuh) into the exponent.
struct RowPair {
  float max[2];  // running maximum of the raw scores, the same in the four lanes of a row
  float sum[2];  // running sum of this thread's own columns; reduced over the lanes at the end
};

__device__ __forceinline__ void row_pair_reset(RowPair& state) {
  state.max[0] = state.max[1] = NEG_INF;
  state.sum[0] = state.sum[1] = 0.f;
}

// Keeps ptxas from pulling a wait for MMAs in flight up before arithmetic that should run under them, which it
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

// The largest of this thread's scores of each row, and of `seen`.
template <int N>
__device__ __forceinline__ void own_maxima(const float (&s)[N / 2], const float (&seen)[2], float (&top)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float even = seen[r], odd = s[2 * r + 1];
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      even = fmaxf(even, s[4 * j + 2 * r]);
      if (j > 0) odd = fmaxf(odd, s[4 * j + 2 * r + 1]);
    }
    top[r] = fmaxf(even, odd);
  }
}

// The largest of what a row's four lanes have.
__device__ __forceinline__ void maxima_of_lanes(float (&top)[2]) {
#pragma unroll
  for (int lanes = 1; lanes <= 2; lanes *= 2)
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], lanes));
}

// The largest score of each row seen so far, the same in its four lanes.
template <int N>
__device__ __forceinline__ void row_maxima(const float (&s)[N / 2], const RowPair& state, float (&top)[2]) {
  own_maxima<N>(s, state.max, top);
  maxima_of_lanes(top);
}

// Turns scores into unnormalised probabilities relative to the running maximum, and gives the factor by which
// everything accumulated so far shrinks. MASKED: a row may have no visible key yet. SUBTRACTS: scores may be so large that the maximum
// is subtracted before the product, whose rounding would be an exponent. `wait` is called after WAIT_EIGHTHS eighths of
// the exponentials, or before the maximum (-1), from where ptxas moves it as it likes.
template <int N, bool MASKED, int WAIT_EIGHTHS = -1, bool SUBTRACTS = false, typename Wait = NoWait>
__device__ __forceinline__ void softmax_scores(float (&s)[N / 2], RowPair& state, float scale_log2, float (&shrink)[2],
                                               Wait wait = Wait()) {
  if (WAIT_EIGHTHS < 0) wait();
  float top[2];
  row_maxima<N>(s, state, top);
  float offset[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float safe = MASKED && top[r] == NEG_INF ? 0.f : top[r];
    shrink[r] = exp2_approx((state.max[r] - safe) * scale_log2);
    offset[r] = SUBTRACTS ? -safe : -safe * scale_log2;
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
        x = exp2_approx(SUBTRACTS ? (x + offset[r]) * scale_log2 : fmaf(x, scale_log2, offset[r]));
        sum[r][e] += x;
      }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] = fmaf(state.sum[r], shrink[r], sum[r][0] + sum[r][1]);
}

// The same of scores that lie in natural units at `unit` times `s` plus a `base` that the thread has for each row, which so costs nothing
// here (ALiBi's distances, score.cuh).
template <int N, bool MASKED, typename Wait>
__device__ __forceinline__ void softmax_moved(float (&s)[N / 2], RowPair& state, float unit, const float (&base)[2], float log2_e,
                                              float (&shrink)[2], Wait wait) {
  wait();
  float top[2];
  own_maxima<N>(s, {NEG_INF, NEG_INF}, top);
#pragma unroll
  for (int r = 0; r < 2; ++r) top[r] = fmaxf(state.max[r], fmaf(top[r], unit, base[r]));
  maxima_of_lanes(top);
  float sum[2][2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float safe = MASKED && top[r] == NEG_INF ? 0.f : top[r];
    shrink[r] = exp2_approx((state.max[r] - safe) * log2_e);
    state.max[r] = top[r];
    const float offset = (base[r] - safe) * log2_e;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float& x = s[i / 2 * 4 + 2 * r + i % 2];
      x = exp2_approx(fmaf(x, unit * log2_e, offset));
      sum[r][i % 2] += x;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] = fmaf(state.sum[r], shrink[r], sum[r][0] + sum[r][1]);
}

// Above each row's scores of a tile that lie at `unit` times `s` plus `step` for each key plus `base`, by less than `step` for LINE_KEYS
// keys: what the keys add is taken for so many at once. NaN where a score is.
constexpr int LINE_KEYS = 32;
template <int N>
__device__ __forceinline__ void line_bounds(const float (&s)[N / 2], float unit, float step, const float (&base)[2], float (&top)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = NEG_INF;
#pragma unroll
    for (int first = 0; first < N / 8; first += LINE_KEYS / 8) {
      const int end = first + LINE_KEYS / 8 < N / 8 ? first + LINE_KEYS / 8 : N / 8;
      float even = s[4 * first + 2 * r], odd = s[4 * first + 2 * r + 1];
#pragma unroll
      for (int j = first + 1; j < end; ++j) even = max_nan(even, s[4 * j + 2 * r]), odd = max_nan(odd, s[4 * j + 2 * r + 1]);
      top[r] = max_nan(top[r], fmaf(max_nan(even, odd), unit, fmaf(step, float(8 * end - 7), base[r])));
    }
  }
}

// Softmax of such scores, all in log2 units, relative to `reference`, which becomes at least this tile's bound `top`. Whether O has to shrink.
template <int N, typename Wait>
__device__ __forceinline__ bool softmax_line(float (&s)[N / 2], float (&sum)[2], float unit, float step, const float (&base)[2],
                                             float (&top)[2], float (&reference)[2], float (&shrink)[2], Wait wait) {
  maxima_of_lanes(top);
  const bool rises = __any_sync(~0u, !(top[0] <= reference[0] && top[1] <= reference[1]));
  float parts[2][2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float now = max_nan(reference[r], top[r]);
    shrink[r] = exp2_approx(reference[r] - now);
    reference[r] = now;
    const float offset = base[r] - now;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float& x = s[i / 2 * 4 + 2 * r + i % 2];
      x = exp2_approx(fmaf(step, float(i / 2 * 8 + i % 2), fmaf(x, unit, offset)));
      parts[r][i % 2] += x;
    }
  }
  wait();
#pragma unroll
  for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], shrink[r], parts[r][0] + parts[r][1]);
  return rises;
}

// The same of scores that are never above 0, nor so far below it that a weight would be lost: no maximum, and nothing ever shrinks.
template <int N, typename Wait>
__device__ __forceinline__ void softmax_bounded(float (&s)[N / 2], RowPair& state, float scale_log2, Wait wait) {
  wait();
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    s[i] = exp2_approx(s[i] * scale_log2);
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[r] += sum[r][0] + sum[r][1];
}

template <int COUNT>
__device__ __forceinline__ void scale_rows(float (&o)[COUNT], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) o[i] *= factor[(i / 2) % 2];
}

// ------------------- rows that are settled
//
// Where no key holds much of a row's weight, new keys seldom do. Weights are then relative to a reference that stays: there is no maximum
// between QKᵀ and the exponentials, and O is not rescaled. Where new weights are much beside all that a thread has seen of its row, the
// reference rises to the row's largest, which so is exactly 1 and not rounded, as it is where every tile has its maximum. A weight that
// overflows leaves a sum or an O that is not finite.

constexpr float SETTLED_SUM = 4.f;  // in largest weights
// New weights above 1 that add up to this share of what a thread has seen are much: a thread has about a quarter of a row, so that a new weight of
// a tenth of it is not rounded. What rounding a weight of more does to O of N(0, 1) values is past 1e-3 in one element of some ten million.
constexpr float MUCH = 0.4f;
// Weights of so many powers of two and more count as overflowed: what they are divided by would be no normal number.
constexpr float MOST_RISE = 120.f;

// Whether no key holds more than a quarter of this thread's rows.
__device__ __forceinline__ bool are_settled(const RowPair& state) {
  bool settled = true;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = state.sum[r] + __shfl_xor_sync(~0u, state.sum[r], 1);
    total += __shfl_xor_sync(~0u, total, 2);
    settled = settled && total >= SETTLED_SUM;
  }
  return settled;
}

// Weights relative to the reference, `offset` in log2 units. Whether some of this warp's are much beside what was there.
template <int N, typename Wait>
__device__ __forceinline__ bool softmax_settled(float (&s)[N / 2], RowPair& state, float scale_log2, const float (&offset)[2],
                                                Wait wait) {
  wait();
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int r = i / 2 % 2;
    s[i] = exp2_approx(fmaf(s[i], scale_log2, offset[r]));
    sum[r][i % 2] += s[i];
  }
  bool beyond = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    beyond = beyond || fmaxf(sum[r][0], sum[r][1]) > fmaxf(MUCH * state.sum[r], 1.f);
    state.sum[r] += sum[r][0] + sum[r][1];
  }
  return __any_sync(~0u, beyond);
}

// The reference becomes the largest weight of each row of this tile, where that is above it.
template <int N, int COLUMNS>
__device__ __forceinline__ void raise_reference(float (&s)[N / 2], float (&o)[COLUMNS], RowPair& state, float scale_log2,
                                                float (&offset)[2]) {
  float top[2], factor[2];
  own_maxima<N>(s, {1.f, 1.f}, top);
  maxima_of_lanes(top);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float rise = __log2f(top[r]);
    factor[r] = rise < MOST_RISE ? exp2_approx(-rise) : __int_as_float(0x7fffffff);
    offset[r] -= rise;
    if (rise > 0.f) state.max[r] += __fdividef(rise, scale_log2);
    state.sum[r] *= factor[r];
  }
  scale_rows(s, factor);
  scale_rows(o, factor);
}

// Probabilities as the A operand of PV.
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

__device__ __forceinline__ void reduce_row_sums(RowPair& state) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 1);
    state.sum[r] += __shfl_xor_sync(~0u, state.sum[r], 2);
  }
}
