// The score hook: the one place where scores change between QKᵀ and the softmax.
//
// A kernel names one as `ScoreHook`:
//   ACTIVE                          whether it changes scores at all; otherwise nothing of it is compiled
//   HIDES                           whether it hides keys, besides the band
//   ScoreHook(p, bounds, batch, head)   made for one head; `bounds` are the sequence's lengths (mask.cuh)
//   hook(score, row, key)           the score that the softmax sees instead of the raw product; the band is masked after it
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

  __device__ __forceinline__ float operator()(float score, int row, int key) const {
    const bool exists = row < seq_q && key < seq_kv;  // elsewhere there is nothing to read
    float x = score;
    if (CAPS) x = tanh_exact(x * (p.scale / p.softcap));
    if (LOG2_UNITS) x *= CAPS ? p.softcap * LOG2_E : p.scale_log2;
    if (SLOPES) x = fmaf(-slope * LOG2_E, float(abs(row + position - key)), x);
    if (ADDS && exists) x = finite_sum(x, bias_at(row * p.bias_stride[2] + key));
    if (MASKS && exists && !mask[row * p.mask_stride[2] + key]) x = NEG_INF;
    return x;
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
  __device__ __forceinline__ float bias_at(long long at) const {
    if (p.bias_type == SDPA_BIAS_F32) return static_cast<const float*>(bias)[at];
    if (p.bias_type == SDPA_BIAS_F16) return to_float(static_cast<const __half*>(bias)[at]);
    return to_float(static_cast<const __nv_bfloat16*>(bias)[at]);
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

// The hook on a thread's accumulators of two rows (layout: mma.cuh), of which the first is the score of key `column`.
template <int N, typename Hook>
__device__ __forceinline__ void apply_hook(const Hook& hook, float (&s)[N / 2], const int (&rows)[2], int column) {
  if constexpr (Hook::ACTIVE) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) s[i] = hook(s[i], rows[i / 2 % 2], column + i / 4 * 8 + i % 2);
  }
}
