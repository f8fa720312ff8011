// ampere_fwd: the two GEMMs of a warp, by mma.sync m16n8k16.
#pragma once
#include "layout.cuh"
#include "mma.cuh"

namespace {

// Q of a warp as the A operand: in registers from the first tile on, or read again for every step of every tile.
struct Queries {
  u32 fragments[Q_IN_REGS ? K_STEPS : 1][M_TILES][4];

  __device__ __forceinline__ void read_step(u32 q_lane, int step) {
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) ldmatrix_x4(fragments[Q_IN_REGS ? step : 0][mt], QTile::advance(q_lane, step, mt));
  }
  __device__ __forceinline__ void read(u32 q_lane) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) read_step(q_lane, step);
  }
};

// Where a warp's first values of a tile lie for its ldmatrix.
__device__ __forceinline__ u32 value_offset(int warp_key, int lane) { return VTile::offset(warp_key + (lane & 15), lane >> 4); }

// S = Q · Kᵀ
__device__ __forceinline__ void multiply_keys(float (&s)[M_TILES][N_TILES][4], Queries& queries, u32 q_lane, u32 k_lane, const TilesAt&) {
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    if (!Q_IN_REGS) queries.read_step(q_lane, step);
    u32(&a)[M_TILES][4] = queries.fragments[Q_IN_REGS ? step : 0];
#pragma unroll
    for (int n = 0; n < N_TILES / 2; ++n) {
      u32 b[4];
      ldmatrix_x4(b, KTile::advance(k_lane, step, n));
#pragma unroll
      for (int mt = 0; mt < M_TILES; ++mt) {
        mma_m16n8k16(s[mt][2 * n], a[mt], b[0], b[1]);
        mma_m16n8k16(s[mt][2 * n + 1], a[mt], b[2], b[3]);
      }
    }
  }
}

// O += A · V for 16 keys, from the block16-th on.
__device__ __forceinline__ void multiply_values(float (&o)[M_TILES][O_TILES][4], const u32 (&a)[M_TILES][4], u32 v_lane,
                                                int block16) {
#pragma unroll
  for (int c = 0; c < O_TILES / 2; ++c) {
    u32 b[4];
    ldmatrix_x4_trans(b, VTile::advance(v_lane, c, block16));
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
      mma_m16n8k16(o[mt][2 * c], a[mt], b[0], b[1]);
      mma_m16n8k16(o[mt][2 * c + 1], a[mt], b[2], b[3]);
    }
  }
}

// O += P · V for this warp's keys; PRECISE, with what the 16-bit rounding of P leaves over in a second PV. Both are
// done for 16 keys before the next: their P is then no longer needed.
template <bool PRECISE>
__device__ __forceinline__ void accumulate_pv(float (&o)[M_TILES][O_TILES][4], const float (&p)[M_TILES][N_TILES][4],
                                              u32 v_lane) {
#pragma unroll
  for (int k = 0; k < WARP_KEYS / 16; ++k) {
    u32 a[M_TILES][4], rest[M_TILES][4];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* pair = &p[mt][2 * k + r / 2][(r % 2) * 2];
        a[mt][r] = pack_pair(pair[0], pair[1]);
        if (PRECISE) {
          const float2 kept = unpack_pair(a[mt][r]);
          rest[mt][r] = pack_pair(pair[0] - kept.x, pair[1] - kept.y);
        }
      }
    multiply_values(o, a, v_lane, k);
    if (PRECISE) multiply_values(o, rest, v_lane, k);
  }
}

}  // namespace
