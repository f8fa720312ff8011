// The score hook: the one place where scores change between QKᵀ and the softmax.
//
// A kernel names one as `ScoreHook`:
//   ACTIVE                          whether it changes scores at all; otherwise nothing of it is compiled
//   HIDES                           whether it hides keys, besides the band
//   ScoreHook(p, bounds, batch, head)   made for one head; `bounds` are the sequence's lengths (mask.cuh)
//   NATURAL_UNITS                   whether changed scores are in natural units, and the softmax subtracts before it multiplies (softmax.cuh)
//   BOUNDED                         whether changed scores need no maximum, where they are not steep
//   READS, Fetched                  whether it reads a bias or a mask, and what can be read of it before there are scores
//   is_gentle(p, head)              whether a slope is one of models', where MOVES
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

// tanh(y) / y as polynomials in y^2, by relative error: 7e-6 up to 1, and 4e-7 up to a quarter.
constexpr float TANH_RANGE = 1.f, SHORT_TANH_RANGE = 0.25f;
constexpr float TANH[5] = {0.999993089f, -0.332980653f, 0.130368113f, -0.0448175552f, 0.00903642452f};
constexpr float SHORT_TANH[3] = {0.999999604f, -0.333219082f, 0.128416134f};

constexpr float FLAT_CAP = 5.f;       // up to which no few of FLAT_KEYS keys can hold most of a row's weight
constexpr int FLAT_KEYS = 512;
constexpr float LARGE_CAP = 30.f;     // from which scores below -SHORT_TANH_RANGE caps weigh next to nothing beside one of 0
constexpr float LEAST_SCALE = 1e-3f;  // of which a slope is so many times as large that it stays finite

// unit * x * P((x * inner)^2) + offset for a polynomial P of so many terms.
template <int TERMS>
struct OddPolynomial {
  float terms[TERMS];
  __device__ __forceinline__ OddPolynomial(const float (&of)[TERMS], float unit, float inner) {
#pragma unroll
    for (int k = 0; k < TERMS; ++k) terms[k] = of[k] * unit, unit *= inner * inner;
  }
  __device__ __forceinline__ float plus(float x, float offset) const {
    float sum = terms[TERMS - 1];
#pragma unroll
    for (int k = TERMS - 2; k >= 0; --k) sum = fmaf(sum, x * x, terms[k]);
    return fmaf(x, sum, offset);
  }
};

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
  static __device__ __forceinline__ bool is_steep(const SdpaParams& p) { return SLOPES || CAPS && p.softcap > FLAT_CAP; }
  // Whether a head's weights fall to the left, and so slowly that a bound on what a few keys add keeps their digits (line_bounds).
  static __device__ __forceinline__ bool is_gentle(const SdpaParams& p, int head) {
    return SLOPES && p.alibi_slopes[head] >= 0.f && p.alibi_slopes[head] <= 1.f;
  }

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

  // Weights of such keys, relative to the cap. Where all of a warp's scores are within TANH_RANGE caps, tanh is a polynomial that runs beside
  // the exponentials, and no MUFU instruction.
  template <int N, typename Wait>
  __device__ __forceinline__ void weigh_bounded(float (&s)[N / 2], RowPair& state, Wait wait) const {
    const float per_cap = __fdividef(p.scale, p.softcap);
    float top[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N / 2; ++i) top[i % 2] = fmaxf(top[i % 2], fabsf(s[i]));
    if (__all_sync(~0u, fmaxf(top[0], top[1]) * per_cap <= TANH_RANGE)) {
      const OddPolynomial<5> tanh(TANH, p.scale_log2, per_cap);
      const float offset = -p.softcap * LOG2_E;
      float sum[2][2] = {};
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        s[i] = exp2_approx(tanh.plus(s[i], offset));
        sum[i / 2 % 2][i % 2] += s[i];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) state.sum[r] += sum[r][0] + sum[r][1];
      wait();
    } else {
      cap_visible(s);
      softmax_bounded<N>(s, state, scale_log2(p), NoWait());
      wait();
    }
  }

  // Weights of such keys relative to the running maximum, and the sums of their squares. tanh is monotone: the maximum is found before it.
  // Where a warp's rows have one between 0 and SHORT_TANH_RANGE of a LARGE_CAP, tanh is a short polynomial beside the exponentials: what lies
  // far below 0 gets a weight that is wrong, but by less than 3e-7 of the largest. Whether O has to shrink.
  template <int N, typename Wait>
  __device__ __forceinline__ bool weigh_capped(float (&s)[N / 2], RowPair& state, float (&shrink)[2], float (&squares)[2], Wait wait) const {
    const float per_cap = __fdividef(p.scale, p.softcap), unit = scale_log2(p);
    constexpr float OF_ZERO = -0.5f;  // h of a score of 0
    float top[2], offset[2], sum[2] = {};
    own_maxima<N>(s, {NEG_INF, NEG_INF}, top);
    maxima_of_lanes(top);
    const bool in_range =
        p.softcap >= LARGE_CAP && fmaxf(top[0], top[1]) * per_cap <= SHORT_TANH_RANGE && fminf(state.max[0], state.max[1]) >= OF_ZERO;
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(state.max[r], half_tanh(top[r] * (2.f * LOG2_E * per_cap)));
    const bool rises = __any_sync(~0u, top[0] > state.max[0] || top[1] > state.max[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shrink[r] = exp2_approx((state.max[r] - top[r]) * unit);
      offset[r] = -top[r] * unit;
      state.max[r] = top[r];
    }
    squares[0] = squares[1] = 0.f;
    const auto count = [&](int i) {
      sum[i / 2 % 2] += s[i];
      squares[i / 2 % 2] = fmaf(s[i], s[i], squares[i / 2 % 2]);
    };
    if (__all_sync(~0u, in_range)) {
      const OddPolynomial<3> tanh(SHORT_TANH, p.scale_log2, per_cap);
#pragma unroll
      for (int r = 0; r < 2; ++r) offset[r] -= p.softcap * LOG2_E;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) s[i] = exp2_approx(tanh.plus(s[i], offset[i / 2 % 2])), count(i);
      wait();
    } else {
      cap_visible(s);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) s[i] = exp2_approx(fmaf(s[i], unit, offset[i / 2 % 2])), count(i);
      wait();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[r] = fmaf(state.sum[r], shrink[r], sum[r]);
    return rises;
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

  // What is read of a tile's bias or mask before its scores are there. The four lanes of a row read it together, in pieces that lie side by
  // side, and share it out while they wait for the scores. Where a line does not allow it, or ends within the tile, nothing is read here, and
  // `change` does it.
  template <int COUNT>
  struct Fetched {
    static constexpr int KEYS = 2 * COUNT;
    u32 bias[ADDS ? COUNT / 2 : 1];  // two keys each, as scores lie
    u32 mask[MASKS ? COUNT / 4 : 1];
    u32 bits[MASKS ? 8 : 1];  // of both rows, four words of 16 keys of each 64
    bool has_bias, has_mask;

    __device__ __forceinline__ void fill(const ScoreModifiers& hook, const int (&rows)[2], int column) {
      const bool inside = column + (KEYS - 7) < hook.seq_kv;
      const SdpaParams& p = hook.p;
      const int lane = column % 8 / 2, first = column - 2 * lane;
      if constexpr (ADDS) {
        // of each 16 keys one half of the first eight, or of the others
        const u16* const part = static_cast<const u16*>(hook.bias) + first + lane % 2 * 8 + lane / 2 * 4;
        has_bias = inside && p.bias_type != SDPA_BIAS_F32 && ((reinterpret_cast<size_t>(part) | 2 * p.bias_stride[2]) & 7) == 0;
        if (has_bias) {
          const u16* const lines[2] = {part + hook.row_there(rows[0]) * p.bias_stride[2], part + hook.row_there(rows[1]) * p.bias_stride[2]};
#pragma unroll
          for (int i = 0; i < COUNT / 4; ++i) {
            const uint2 two = *reinterpret_cast<const uint2*>(lines[i % 2] + i / 2 * 16);
            bias[i / 2 * 4 + i % 2] = two.x, bias[i / 2 * 4 + i % 2 + 2] = two.y;
          }
          pin_loads(bias);
        }
      }
      if constexpr (MASKS) {
        const unsigned char* const part = hook.mask + first + 16 * lane;  // of each 64 keys 16
        has_mask = inside && KEYS % 64 == 0 && ((reinterpret_cast<size_t>(part) | p.mask_stride[2]) & 15) == 0;
        if (has_mask) {
#pragma unroll
          for (int i = 0; i < COUNT / 16; ++i)
            *reinterpret_cast<uint4*>(&mask[4 * i]) =
                *reinterpret_cast<const uint4*>(part + hook.row_there(rows[i % 2]) * p.mask_stride[2] + i / 2 * 64);
          pin_loads(mask);
        }
      }
    }

    __device__ __forceinline__ void share(int lane) {
      if constexpr (ADDS)
        if (has_bias) share_bias(lane % 2);
      if constexpr (MASKS)
        if (has_mask) share_mask(lane % 4);
    }

   private:
    // Two lanes have the same half of eight keys each: each takes its two keys of both.
    __device__ __forceinline__ void share_bias(bool odd) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; i += i % 4 ? 3 : 1) {
        u32 &first = bias[i], &second = bias[i + 2];
        const u32 got = __shfl_xor_sync(~0u, odd ? first : second, 1);
        (odd ? first : second) = got;
      }
    }

    // 16 bytes to as many bits: a byte that is not 0 becomes 0x80, and a dot product puts four of them in their places.
    static __device__ __forceinline__ u32 bits_of(const u32 (&bytes)[COUNT / 4], int first) {
      u32 bits[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 word = bytes[first + i];
        const u32 seen = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
        bits[i / 2] = __dp4a(seen, i % 2 ? 0x80402010u : 0x08040201u, bits[i / 2]);
      }
      return (bits[0] + (bits[1] << 8)) >> 7;
    }
    __device__ __forceinline__ void share_mask(int lane) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 own = 0;
#pragma unroll
        for (int k = 0; k < KEYS / 64; ++k) own |= bits_of(mask, 4 * (2 * k + r)) << (16 * k);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[4 * r + i] = __shfl_sync(~0u, own, i, 4) >> (2 * lane);
      }
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
        for (int i = 0; i < COUNT; ++i) {
          const int eight = i / 4;
          if (!(fetched.bits[i / 2 % 2 * 4 + eight % 8 / 2] >> (eight / 8 * 16 + eight % 2 * 8 + i % 2) & 1)) s[i] = NEG_INF;
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
