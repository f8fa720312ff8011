// The score hook: the one place where scores change between QKᵀ and the softmax.
//
// A kernel names one as `ScoreHook`:
//   ACTIVE                          whether it changes scores at all; otherwise nothing of it is compiled
//   HIDES                           whether it hides keys, besides the band
//   ScoreHook(p, bounds, batch, head)   made for one head; `bounds` are the sequence's lengths (mask.cuh)
//   change(first, second, s, rows, column)   a thread's raw scores of two rows (layout: mma.cuh), each with the hook of its head, become what
//                                   the softmax sees; the first is of key `column`, and the band is masked after it
//   scale(p), scale_log2(p)         what turns such a score into natural and log2 units
//   inverse(p, head, max, sum)      what a finished row's O is multiplied with: one over its softmax denominator
//   lse(p, head, max, sum)          the natural logarithm of that denominator
#pragma once
#include "lse.cuh"
#include "mask.cuh"
#include "softmax.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float BIAS_END = 3.2e38f;  // what a finite bias that overflows in log2 units becomes

// tanh within 2e-7 of the truth everywhere: its error is multiplied by the cap, so tanh.approx (2^-11) will not do. Near 0, where the
// quotient loses digits, by its series.
__device__ __forceinline__ float tanh_exact(float x) {
  const float power = exp2_approx(fabsf(x) * (2.f * LOG2_E));
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(power + 1.f));
  const float far = copysignf(fmaf(-2.f, quotient, 1.f), x);
  const float square = x * x;
  const float near = fmaf(x * square, fmaf(square, fmaf(square, -17.f / 315, 2.f / 15), -1.f / 3), x);
  return square < 0.04f ? near : far;
}

// The same for |x| < CAP_NEAR, of y = x * (2 / CAP_NEAR): y times a minimax polynomial in y². It needs no MUFU: three of those for a score
// would take longer than the MMAs that run beside the softmax.
constexpr float CAP_NEAR = 0.75f;
__device__ __forceinline__ float tanh_near(float y) {
  const float z = y * y;
  float sum = fmaf(z, -9.72615908e-08f, 2.87182911e-06f);
  sum = fmaf(z, sum, -5.56298583e-05f);
  sum = fmaf(z, sum, 9.8818168e-04f);
  sum = fmaf(z, sum, -1.75779276e-02f);
  return y * fmaf(z, sum, 0.375f);
}

// Each argument: whether the problem asks for it. With none of them scores stay as they are, and the scale costs nothing: the softmax
// multiplies it into the exponent.
template <bool CAPS = false, bool SLOPES = false, bool ADDS = false, bool MASKS = false, bool SINKS_TOO = false>
struct ScoreModifiers {
  static constexpr bool ACTIVE = CAPS || SLOPES || ADDS || MASKS;
  static constexpr bool HIDES = MASKS || ADDS;  // a bias may be minus infinity
  // Slopes and biases are as large as a model likes: the softmax is to subtract two equal ones without a product before it, whose rounding
  // would be an exponent. So the hook leaves such scores in log2 units.
  static constexpr bool LOG2_UNITS = SLOPES || ADDS;

  const SdpaParams& p;
  const void* bias;
  const unsigned char* mask;
  float slope;
  int position, seq_q, seq_kv;

  template <typename Bounds>
  __device__ __forceinline__ ScoreModifiers(const SdpaParams& params, const Bounds& bounds, int batch, int head)
      : p(params), position(bounds.position), seq_q(bounds.seq_q), seq_kv(bounds.seq_kv) {
    if (SLOPES) slope = p.alibi_slopes[head];
    if (ADDS) {
      const long long first = batch * p.bias_stride[0] + head * p.bias_stride[1];
      bias = static_cast<const char*>(p.bias) + first * (p.bias_type == SDPA_BIAS_F32 ? 4 : 2);
    }
    if (MASKS) mask = p.mask + batch * p.mask_stride[0] + head * p.mask_stride[1];
  }

  template <int COUNT>
  static __device__ __forceinline__ void change(const ScoreModifiers& first, const ScoreModifiers& second, float (&s)[COUNT],
                                                const int (&rows)[2], int column) {
    const ScoreModifiers* const hooks[2] = {&first, &second};
    if (CAPS) cap(first.p, s);
    if (LOG2_UNITS) {
      const float unit = CAPS ? first.p.softcap * LOG2_E : first.p.scale_log2;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] = fmaf(s[i], unit, SLOPES ? hooks[i / 2 % 2]->slope_at(rows, column, i) : 0.f);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (ADDS) hooks[r]->add_bias(s, r, rows[r], column);
      if (MASKS) hooks[r]->along(hooks[r]->mask + rows[r] * hooks[r]->p.mask_stride[2], s, r, rows[r], column);
    }
  }

  static __device__ __forceinline__ float scale(const SdpaParams& p) { return LOG2_UNITS ? 1.f / LOG2_E : CAPS ? p.softcap : p.scale; }
  static __device__ __forceinline__ float scale_log2(const SdpaParams& p) {
    return LOG2_UNITS ? 1.f : CAPS ? p.softcap * LOG2_E : p.scale_log2;
  }

  static __device__ __forceinline__ float inverse(const SdpaParams& p, int head, float max, float sum) {
    if (!SINKS_TOO) return sum > 0.f ? 1.f / sum : 0.f;
    const Denominator all = with_sink(p, head, max, sum);
    return all.sum > 0.f ? all.kept / all.sum : 0.f;
  }
  static __device__ __forceinline__ float lse(const SdpaParams& p, int head, float max, float sum) {
    if (!SINKS_TOO) return log_sum_exp(max, sum, scale(p));
    const Denominator all = with_sink(p, head, max, sum);
    return all.max + __logf(all.sum);
  }

 private:
  // Scores become tanh of themselves over the cap. Nearly always all of a thread's are near 0: floats below 2 leave bit 30 clear.
  template <int COUNT>
  static __device__ __forceinline__ void cap(const SdpaParams& p, float (&s)[COUNT]) {
    const float to_y = p.scale / p.softcap * (2.f / CAP_NEAR);
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      s[i] *= to_y;
      bits |= __float_as_uint(s[i]);
    }
    if (bits & 0x40000000u) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] = tanh_exact(s[i] * (CAP_NEAR / 2));
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] = tanh_near(s[i]);
    }
  }

  // Distances are floats: whole numbers stay exact, and an integer of each score would have to be converted.
  __device__ __forceinline__ float slope_at(const int (&rows)[2], int column, int i) const {
    const float distance = float(rows[i / 2 % 2] + position - column) - float(i / 4 * 8 + i % 2);
    return fabsf(distance) * (-slope * LOG2_E);
  }

  // What a key's byte of a mask and its element of a bias do to a score.
  static __device__ __forceinline__ void meet(float& score, unsigned char seen) {
    if (!seen) score = NEG_INF;
  }
  template <typename T>
  static __device__ __forceinline__ void meet(float& score, T bias) {
    score = finite_sum(score, to_float(bias));
  }

  // Scores of one row meet a line of a bias or a mask. Keys come in pairs: two are read at once where the line allows it, and where O of
  // wide heads leaves the registers.
  template <int COUNT, typename T>
  __device__ __forceinline__ void along(const T* line, float (&s)[COUNT], int r, int row, int column) const {
    constexpr int LAST = COUNT / 4 * 8 - 7;
    if (row >= seq_q) return;  // there is nothing to read
    line += column;
    if (VALUE_DIM <= 128 && column + LAST < seq_kv && reinterpret_cast<size_t>(line) % (2 * sizeof(T)) == 0) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; ++i) {
        struct alignas(2 * sizeof(T)) Two {
          T x, y;
        };
        const Two two = *reinterpret_cast<const Two*>(line + 8 * i);
        meet(s[4 * i + 2 * r], two.x);
        meet(s[4 * i + 2 * r + 1], two.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const int key = i / 2 * 8 + i % 2;
        if (column + key < seq_kv) meet(s[i / 2 * 4 + 2 * r + i % 2], line[key]);
      }
    }
  }

  template <int COUNT>
  __device__ __forceinline__ void add_bias(float (&s)[COUNT], int r, int row, int column) const {
    const long long first = row * p.bias_stride[2];
    if (p.bias_type == SDPA_BIAS_F32) along(static_cast<const float*>(bias) + first, s, r, row, column);
    else if (p.bias_type == SDPA_BIAS_F16) along(static_cast<const __half*>(bias) + first, s, r, row, column);
    else along(static_cast<const __nv_bfloat16*>(bias) + first, s, r, row, column);
  }

  // Models fill rows with the lowest number there is; such a row is a mean, not NaN.
  static __device__ __forceinline__ float finite_sum(float score, float bias) {
    const float sum = fmaf(bias, LOG2_E, score);
    const bool overflows = fabsf(sum) > BIAS_END && fabsf(bias) < -NEG_INF && fabsf(score) < -NEG_INF;
    return overflows ? copysignf(BIAS_END, sum) : sum;
  }

  // A denominator with its sink: relative to a maximum in natural units, and what is left of the keys' part. A sink comes when a row is
  // finished and costs the loop nothing. A row without keys has its sink alone.
  struct Denominator {
    float max, sum, kept;
  };
  static __device__ __forceinline__ Denominator with_sink(const SdpaParams& p, int head, float max, float sum) {
    const float sink = p.sinks[head];
    const float keys = max == NEG_INF ? NEG_INF : max * scale(p);
    const float top = fmaxf(keys, sink);
    const float safe = top == NEG_INF ? 0.f : top;
    const float kept = exp2_approx((keys - safe) * LOG2_E);
    return {top, fmaf(sum, kept, exp2_approx((sink - safe) * LOG2_E)), kept};
  }
};

using PlainScores = ScoreModifiers<>;
