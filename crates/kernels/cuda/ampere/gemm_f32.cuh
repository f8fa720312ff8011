// ampere_f32: the two GEMMs of a warp in f32, by three mma.sync of tf32 each. An operand is the sum of a high and a low part of 11 bits; the
// product of the two low parts, 2^-22 of the whole, is left out.
#pragma once
#include "layout.cuh"
#include "mma.cuh"

namespace {

static_assert(VALUE_DIM % 32 == 0, "values are read from panels of 128 bytes");

// Q is read again for every tile: its parts would take twice the registers.
struct Queries {
  __device__ __forceinline__ void read(u32) {}
};

template <int COUNT>
struct Parts {
  u32 high[COUNT], low[COUNT];
};

// Rounded, so that the low part is small and of either sign. Infinities give NaN: see exact_scores.
template <int COUNT>
__device__ __forceinline__ Parts<COUNT> rounded_parts(const u32 (&bits)[COUNT]) {
  Parts<COUNT> parts;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    parts.high[i] = round_to_tf32(__uint_as_float(bits[i]));
    parts.low[i] = __float_as_uint(__uint_as_float(bits[i]) - __uint_as_float(parts.high[i]));
  }
  return parts;
}

// Cut off, so that the largest values stay finite.
__device__ __forceinline__ Parts<2> truncated_parts(float first, float second) {
  Parts<2> parts;
  parts.high[0] = __float_as_uint(first) & TF32_BITS;
  parts.high[1] = __float_as_uint(second) & TF32_BITS;
  parts.low[0] = __float_as_uint(first - __uint_as_float(parts.high[0]));
  parts.low[1] = __float_as_uint(second - __uint_as_float(parts.high[1]));
  return parts;
}

// c += a · b, the small products first.
__device__ __forceinline__ void multiply_parts(float (&c)[4], const Parts<4>& a, const Parts<2>& b) {
  mma_m16n8k8_tf32(c, a.low, b.high[0], b.high[1]);
  mma_m16n8k8_tf32(c, a.high, b.low[0], b.low[1]);
  mma_m16n8k8_tf32(c, a.high, b.high[0], b.high[1]);
}

__device__ __forceinline__ float shared_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// One score by plain arithmetic.
__device__ __forceinline__ float exact_score(u32 q_tile, int row, u32 k_tile, int key) {
  float sum = 0.f;
#pragma unroll 1
  for (int d = 0; d < HEAD_DIM; ++d)
    sum = fmaf(shared_float(q_tile + QTile::offset(row, d / CHUNK) + d % CHUNK * 4),
               shared_float(k_tile + KTile::offset(key, d / CHUNK) + d % CHUNK * 4), sum);
  return sum;
}

// An infinity has no parts whose products add up: scores that came out as NaN are computed again. Never run on ordinary inputs.
__device__ __forceinline__ void exact_scores(float (&s)[M_TILES][N_TILES][4], const TilesAt& at) {
  bool nan = false;
#pragma unroll
  for (int i = 0; i < M_TILES * N_TILES * 4; ++i) nan = nan || isnan(s[i / (4 * N_TILES)][i / 4 % N_TILES][i % 4]);
  if (!__any_sync(~0u, nan)) return;
  const int row = at.row + threadIdx.x % 32 / 4, key = at.key + 2 * (threadIdx.x % 4);
#pragma unroll 1
  for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
    const float score = exact_score(at.q, row + i / (4 * N_TILES) * 16 + i % 4 / 2 * 8, at.k, key + i / 4 % N_TILES * 8 + i % 2);
#pragma unroll
    for (int j = 0; j < M_TILES * N_TILES * 4; ++j) {
      float& old = s[j / (4 * N_TILES)][j / 4 % N_TILES][j % 4];
      if (i == j && isnan(old)) old = score;
    }
  }
}

// S = Q · Kᵀ
__device__ __forceinline__ void multiply_keys(float (&s)[M_TILES][N_TILES][4], Queries&, u32 q_lane, u32 k_lane, const TilesAt& at) {
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    Parts<4> a[M_TILES];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
      u32 bits[4];
      ldmatrix_x4(bits, QTile::advance(q_lane, step, mt));
      a[mt] = rounded_parts(bits);
    }
#pragma unroll
    for (int n = 0; n < N_TILES / 2; ++n) {
      u32 bits[4];
      ldmatrix_x4(bits, KTile::advance(k_lane, step, n));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Parts<2> b = rounded_parts({bits[2 * half], bits[2 * half + 1]});
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) multiply_parts(s[mt][2 * n + half], a[mt], b);
      }
    }
  }
  exact_scores(s, at);
}

// P comes as accumulators, of which a lane has keys 2t and 2t + 1: they take the places of k = t and t + 4 in both operands, since a sum
// does not mind the order of its terms. Lane (g, t) reads column g of those two rows of V, without bank conflicts.
__device__ __forceinline__ u32 value_offset(int warp_key, int lane) {
  return VTile::offset(warp_key + 2 * (lane % 4), lane / 16) + lane / 4 % 4 * 4;
}

// From there to another 8 columns, block of 8 keys, and the key behind.
__device__ __forceinline__ u32 value_address(u32 v_lane, int column8, int block8, int behind) {
  return (v_lane ^ ((2 * column8 % 8 ^ behind) << 4)) + 2 * column8 / 8 * (BLOCK_N * 128) + (block8 * 8 + behind) * 128;
}

// O += P · V for this warp's keys. Tensor cores cut their sums off instead of rounding them, which over thousands of keys would add up: the
// keys of one tile have a sum of their own, COLUMNS_AT_ONCE times 8 columns at a time, and O gets it by a rounded addition.
template <bool PRECISE>
__device__ __forceinline__ void accumulate_pv(float (&o)[M_TILES][O_TILES][4], const float (&p)[M_TILES][N_TILES][4], u32 v_lane) {
  constexpr int COLUMNS_AT_ONCE = M_TILES > 1 || VALUE_DIM > 128 ? 2 : 4;
  Parts<4> a[N_TILES][M_TILES];
#pragma unroll
  for (int k = 0; k < N_TILES; ++k)
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
      const float(&w)[4] = p[mt][k];
      a[k][mt] = rounded_parts({__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]), __float_as_uint(w[3])});
    }
#pragma unroll
  for (int first = 0; first < O_TILES; first += COLUMNS_AT_ONCE) {
    float sum[COLUMNS_AT_ONCE][M_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < N_TILES; ++k)
#pragma unroll
      for (int c = 0; c < COLUMNS_AT_ONCE; ++c) {
        const Parts<2> b =
            truncated_parts(shared_float(value_address(v_lane, first + c, k, 0)), shared_float(value_address(v_lane, first + c, k, 1)));
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) multiply_parts(sum[c][mt], a[k][mt], b);
      }
#pragma unroll
    for (int c = 0; c < COLUMNS_AT_ONCE; ++c)
#pragma unroll
      for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[mt][first + c][i] += sum[c][mt][i];
  }
}

}  // namespace
