// The two GEMMs of a warpgroup, by wgmma on 128-byte-swizzled panels: S = Q · Kᵀ and O += P · V. Issued, not waited for.
#pragma once
#include "wgmma.cuh"

namespace {

// S (+)= Q · Kᵀ with both operands in shared memory; ACCUMULATE: onto what `s` holds.
template <bool ACCUMULATE, int N, int Q_PANEL, int K_PANEL>
__device__ __forceinline__ void issue_qk(float (&s)[N / 2], u32 q_desc, u32 k_desc) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    const int inside = (k % 4) * 2;  // 32 bytes per k16 step, in units of 16
    Wgmma<N>::ss(s, q_desc + inside + (k / 4) * (Q_PANEL >> 4), k_desc + inside + (k / 4) * (K_PANEL >> 4), ACCUMULATE || k > 0);
  }
  wgmma_commit();
}

// The same with Q in registers, four for each k16 step.
template <int N, int K_PANEL, int STEPS>
__device__ __forceinline__ void issue_qk(float (&s)[N / 2], const u32 (&q)[STEPS][4], u32 k_desc) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
    Wgmma<N>::template rs<0>(s, q[k][0], q[k][1], q[k][2], q[k][3], k_desc + (k % 4) * 2 + (k / 4) * (K_PANEL >> 4), k > 0);
  wgmma_commit();
}

// O += P · V, P in registers.
template <int N>
__device__ __forceinline__ void issue_pv(float (&o)[VALUE_DIM / 2], const u32 (&packed)[N / 4], u32 v_desc) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
    Wgmma<VALUE_DIM>::rs(o, packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3], v_desc + k * (2048 >> 4), 1);
  wgmma_commit();
}

}  // namespace
