// The score hook: the one place where scores change between QKᵀ and the softmax.
//
// A kernel names one as `ScoreHook`:
//   ACTIVE                          whether it changes scores at all; otherwise nothing of it is compiled
//   HIDES                           whether it hides keys, besides the band
//   ScoreHook(p, bounds, batch, head)   made for one head; `bounds` are the sequence's lengths (mask.cuh)
//   NATURAL_UNITS                   whether changed scores are in natural units, and the softmax subtracts before it multiplies (softmax.cuh)
//   BOUNDED                         whether changed scores need no maximum, where they are not steep
//   READS, Fetched                  whether it reads a bias or a mask, and what can be read of it before there are scores
//   is_steep(p)                     whether few keys may hold most of a row's weight, however many it sees
//   cap_visible(s)                  `change` of keys that are all visible, where it is BOUNDED
//   MOVES, move(...)                whether rows' parts of the scores can be left to the softmax, and that form of `change`
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

// tanh(x) = 1 + 2 h with h = -1 / (1 + e^2x): from `power` = 2x in log2 units. Two MUFU instructions and a sum, within 7 units of 2^-24 of the
// truth everywhere; tanh.approx (2^-11) will not do, since its error is multiplied by the cap.
__device__ __forceinline__ float half_tanh(float power) {
  float h;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(h) : "f"(-1.f - exp2_approx(power)));
  return h;
}

// The same of four with one reciprocal: MUFU instructions are what a cap waits for. Up to 2^31 their product is finite, and from there on
// tanh is 1. Five more roundings make it 14 units at most: for weights that are rounded to bf16. A NaN among them is one of all.
__device__ __forceinline__ void half_tanh(float& a, float& b, float& c, float& d, float to_power) {
  const auto sum = [=](float x) {
    float power;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(power) : "f"(x * to_power), "f"(31.f));
    return exp2_approx(power) + 1.f;
  };
  const float of_a = sum(a), of_b = sum(b), of_c = sum(c), of_d = sum(d);
  const float ab = of_a * of_b, cd = of_c * of_d;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(-ab * cd));
  const float inverse_ab = inverse * cd, inverse_cd = inverse * ab;
  a = inverse_ab * of_b, b = inverse_ab * of_a;
  c = inverse_cd * of_d, d = inverse_cd * of_c;
}

constexpr float FLAT_CAP = 5.f;       // up to which no few of many keys can hold most of a row's weight
constexpr float LEAST_SCALE = 1e-3f;  // of which a slope is so many times as large that it stays finite

// The loads of these registers are issued here, not where they are first needed.
template <int COUNT>
__device__ __forceinline__ void pin_loads(u32 (&r)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Each argument: whether the problem asks for it. With none of them scores stay as they are, and the scale costs nothing: the softmax
// multiplies it into the exponent.
template <bool CAPS = false, bool SLOPES = false, bool ADDS = false, bool MASKS = false, bool SINKS_TOO = false>
struct ScoreModifiers {
  static constexpr bool ACTIVE = CAPS || SLOPES || ADDS || MASKS;
  static constexpr bool HIDES = MASKS || ADDS;  // a bias may be minus infinity
  // Slopes and biases are as large as a model likes: the softmax is to subtract two equal ones without a product before it, whose rounding
  // would be an exponent (softmax.cuh). So the hook leaves such scores in natural units.
  static constexpr bool NATURAL_UNITS = SLOPES || ADDS;
  static constexpr bool MOVES = SLOPES && !CAPS && !ADDS && !MASKS;
  static constexpr bool READS = ADDS || MASKS;
  // A capped score is at most 0 here, and at least -2 caps. Weights of bf16 keep their digits far below exp(-2 * FLAT_CAP): no maximum is
  // needed.
  static constexpr bool BOUNDED = CAPS && !NATURAL_UNITS && !MASKS && DTYPE_BF16;
  // Whether P is to be kept precise of rows however many keys they see.
  static __device__ __forceinline__ bool is_steep(const SdpaParams& p) { return CAPS && p.softcap > FLAT_CAP; }

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
    first.own_part(second, s, rows, column);
    if (ADDS) first.add_bias(s, 0, rows[0], column), second.add_bias(s, 1, rows[1], column);
    if (MASKS) first.hide(s, 0, rows[0], column), second.hide(s, 1, rows[1], column);
  }

  // The same where a cap is all there is, of keys that are all visible: four keys of a row share what they can, a NaN too.
  template <int COUNT>
  __device__ __forceinline__ void cap_visible(float (&s)[COUNT]) const {
    const float to_power = p.scale_log2 / p.softcap * 2.f;
#pragma unroll
    for (int i = 0; i < COUNT; i += 8) {
#pragma unroll
      for (int r = 0; r < 4; r += 2) half_tanh(s[i + r], s[i + r + 1], s[i + r + 4], s[i + r + 5], to_power);
    }
  }

  // The same where slopes are all there is. A row's keys to the left of it lie on a line: `s` gets what a key's place in the tile adds, one
  // instruction for a score, and a row's `base` in natural units is left to the softmax (softmax_moved). `unit` is what `s` is then
  // multiplied with. Right of the diagonal, and beside a scale so small that the slope in its terms may overflow, the long way.
  template <int COUNT>
  __device__ __forceinline__ void move(float (&s)[COUNT], const int (&rows)[2], int column, const int (&last_keys)[2], float& unit,
                                       float (&base)[2]) const {
    constexpr int LAST = COUNT / 4 * 8 - 7;
    bool on_a_line = p.scale > LEAST_SCALE;
#pragma unroll
    for (int r = 0; r < 2; ++r) on_a_line = on_a_line && min(last_keys[r], column + LAST) <= rows[r] + position;
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = -slope * (on_a_line ? distance(rows, column, 2 * r) : fabsf(distance(rows, column, 2 * r)));
    if (on_a_line) {
      unit = p.scale;
      const float step = __fdividef(slope, unit);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) s[i] = fmaf(step, float(i / 4 * 8 + i % 2), s[i]);
    } else {
      unit = 1.f;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        s[i] = fmaf(s[i], p.scale, -slope * (fabsf(distance(rows, column, i)) - fabsf(distance(rows, column, i / 2 % 2 * 2))));
    }
  }

  // What is read of a tile's bias and mask before its scores are there: two keys a register. Where a line's keys cannot be read in pairs, or
  // end within the tile, nothing, and `change` reads it.
  template <int COUNT>
  struct Fetched {
    u32 bias[ADDS ? COUNT / 2 : 1];
    u32 mask[MASKS ? COUNT / 2 : 1];
    bool has_bias, has_mask;

    __device__ __forceinline__ void fill(const ScoreModifiers& hook, const int (&rows)[2], int column) {
      const bool inside = column + (COUNT / 4 * 8 - 7) < hook.seq_kv;
      const SdpaParams& p = hook.p;
      if constexpr (ADDS) {
        const u16* const line = static_cast<const u16*>(hook.bias) + column;
        has_bias = inside && p.bias_type != SDPA_BIAS_F32 && ((reinterpret_cast<size_t>(line) | 2 * p.bias_stride[2]) & 3) == 0;
        if (has_bias) read_pairs<u32>(bias, line, hook.row_there(rows[0]) * p.bias_stride[2], hook.row_there(rows[1]) * p.bias_stride[2]);
      }
      if constexpr (MASKS) {
        const unsigned char* const line = hook.mask + column;
        has_mask = inside && ((reinterpret_cast<size_t>(line) | p.mask_stride[2]) & 1) == 0;
        if (has_mask) read_pairs<u16>(mask, line, hook.row_there(rows[0]) * p.mask_stride[2], hook.row_there(rows[1]) * p.mask_stride[2]);
      }
    }

    // Pairs of keys of two rows.
    template <typename Pair, typename T>
    static __device__ __forceinline__ void read_pairs(u32 (&pairs)[COUNT / 2], const T* line, long long first, long long second) {
      const T* const lines[2] = {line + first, line + second};
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) pairs[i] = *reinterpret_cast<const Pair*>(lines[i % 2] + i / 2 * 8);
      pin_loads(pairs);
    }
  };

  template <int COUNT>
  static __device__ __forceinline__ void change(const ScoreModifiers& hook, const Fetched<COUNT>& fetched, float (&s)[COUNT],
                                                const int (&rows)[2], int column) {
    if (!ADDS || CAPS || SLOPES) hook.own_part(hook, s, rows, column);
    if constexpr (ADDS) {
      const float unit = CAPS || SLOPES ? 1.f : hook.p.scale;
      if (!fetched.has_bias) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) s[i] *= unit;
        hook.add_bias(s, 0, rows[0], column), hook.add_bias(s, 1, rows[1], column);
      } else if (hook.p.bias_type == SDPA_BIAS_BF16) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
          s[2 * i] = fmaf(s[2 * i], unit, __uint_as_float(fetched.bias[i] << 16));
          s[2 * i + 1] = fmaf(s[2 * i + 1], unit, __uint_as_float(fetched.bias[i] & 0xffff0000u));
        }
      } else {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
          const float2 two = to_float2(*reinterpret_cast<const __half2*>(&fetched.bias[i]));
          s[2 * i] = fmaf(s[2 * i], unit, two.x), s[2 * i + 1] = fmaf(s[2 * i + 1], unit, two.y);
        }
      }
    }
    if constexpr (MASKS) {
      if (fetched.has_mask) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
          if (!(fetched.mask[i] & 0xff)) s[2 * i] = NEG_INF;
          if (!(fetched.mask[i] & 0xff00)) s[2 * i + 1] = NEG_INF;
        }
      } else {
        hook.hide(s, 0, rows[0], column), hook.hide(s, 1, rows[1], column);
      }
    }
  }

  static __device__ __forceinline__ float scale(const SdpaParams& p) { return NATURAL_UNITS ? 1.f : scale_of(p); }
  static __device__ __forceinline__ float scale_log2(const SdpaParams& p) {
    return NATURAL_UNITS ? LOG2_E : CAPS ? p.softcap * (2.f * LOG2_E) : p.scale_log2;
  }

  static __device__ __forceinline__ float inverse(const SdpaParams& p, int head, float max, float sum) {
    if (!SINKS_TOO) return sum > 0.f ? 1.f / sum : 0.f;
    const Denominator all = with_sink(p, head, max, sum);
    return all.sum > 0.f ? all.kept / all.sum : 0.f;
  }
  static __device__ __forceinline__ float lse(const SdpaParams& p, int head, float max, float sum) {
    if (!SINKS_TOO) return raised(p, log_sum_exp(max, sum, scale(p)));
    const Denominator all = with_sink(p, head, max, sum);
    return all.max + __logf(all.sum);
  }

 private:
  // What scores are multiplied with, and what is then still to be added: a capped one is cap * tanh = cap + 2 cap * h.
  static __device__ __forceinline__ float scale_of(const SdpaParams& p) { return CAPS ? 2.f * p.softcap : p.scale; }
  static __device__ __forceinline__ float raised(const SdpaParams& p, float x) { return CAPS && !NATURAL_UNITS ? x + p.softcap : x; }

  // Rows past the last query are read as that one: nobody stores them.
  __device__ __forceinline__ int row_there(int row) const { return min(row, seq_q - 1); }

  // What needs nothing but the scores and their places.
  template <int COUNT>
  __device__ __forceinline__ void own_part(const ScoreModifiers& second, float (&s)[COUNT], const int (&rows)[2], int column) const {
    const ScoreModifiers* const hooks[2] = {this, &second};
    if (CAPS) cap(p, s);
#pragma unroll
    for (int i = 0; i < (NATURAL_UNITS ? COUNT : 0); ++i) {
      s[i] *= scale_of(p);
      if (CAPS) s[i] += p.softcap;
      if (SLOPES) s[i] -= hooks[i / 2 % 2]->slope * fabsf(hooks[i / 2 % 2]->distance(rows, column, i));
    }
  }

  template <int COUNT>
  static __device__ __forceinline__ void cap(const SdpaParams& p, float (&s)[COUNT]) {
    const float to_power = p.scale_log2 / p.softcap * 2.f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) s[i] = half_tanh(s[i] * to_power);
  }

  // Distances are floats: whole numbers stay exact, and an integer of each score would have to be converted.
  __device__ __forceinline__ float distance(const int (&rows)[2], int column, int i) const {
    return float(rows[i / 2 % 2] + position - column) - float(i / 4 * 8 + i % 2);
  }

  // What a key's byte of a mask and its element of a bias do to a score.
  static __device__ __forceinline__ void meet(float& score, unsigned char seen) {
    if (!seen) score = NEG_INF;
  }
  template <typename T>
  static __device__ __forceinline__ void meet(float& score, T bias) {
    score += to_float(bias);
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
  __device__ __forceinline__ void hide(float (&s)[COUNT], int r, int row, int column) const {
    along(mask + row * p.mask_stride[2], s, r, row, column);
  }

  template <int COUNT>
  __device__ __forceinline__ void add_bias(float (&s)[COUNT], int r, int row, int column) const {
    const long long first = row * p.bias_stride[2];
    if (p.bias_type == SDPA_BIAS_F32) along(static_cast<const float*>(bias) + first, s, r, row, column);
    else if (p.bias_type == SDPA_BIAS_F16) along(static_cast<const __half*>(bias) + first, s, r, row, column);
    else along(static_cast<const __nv_bfloat16*>(bias) + first, s, r, row, column);
  }

  // A denominator with its sink: relative to a maximum in natural units, and what is left of the keys' part. A sink comes when a row is
  // finished and costs the loop nothing. A row without keys has its sink alone.
  struct Denominator {
    float max, sum, kept;
  };
  static __device__ __forceinline__ Denominator with_sink(const SdpaParams& p, int head, float max, float sum) {
    const float sink = p.sinks[head];
    const float keys = max == NEG_INF ? NEG_INF : raised(p, max * scale(p));
    const float top = fmaxf(keys, sink);
    const float safe = top == NEG_INF ? 0.f : top;
    const float kept = exp2_approx((keys - safe) * LOG2_E);
    return {top, fmaf(sum, kept, exp2_approx((sink - safe) * LOG2_E)), kept};
  }
};

using PlainScores = ScoreModifiers<>;
