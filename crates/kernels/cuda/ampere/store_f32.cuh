// ampere_f32: rows of O that one warp has.
#pragma once
#include "epilogue.cuh"

namespace {

// The four lanes of a row fill 32 bytes of it at a time.
__device__ __forceinline__ void store_rows(const SdpaParams& p, unsigned char*, const Work& work, float (&o)[M_TILES][O_TILES][4],
                                           const RowPair (&state)[M_TILES]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 % WARPS_M * 16 * M_TILES;
  float* o_base = output_rows(p, work);
  const bool o_aligned = rows_are_16_byte_aligned(o_base, p.o_stride[2]);
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + mt * 16 + r * 8 + lane / 4;
      if (work.m0 + row >= work.bounds(p).seq_q) continue;
      const float inverse = ScoreHook::inverse(p, work.head, state[mt].max[r], state[mt].sum[r]);
      if (lane % 4 == 0) store_lse(p, work, row, state[mt].max[r], state[mt].sum[r]);
      float* to = o_base + (work.m0 + row) * p.o_stride[2];
#pragma unroll
      for (int c = 0; c < O_TILES; ++c) {
        const int column = c * 8 + 2 * (lane % 4);
        const float x = o[mt][c][2 * r] * inverse, y = o[mt][c][2 * r + 1] * inverse;
        if (o_aligned && column + 2 <= p.dim_v) {
          *reinterpret_cast<float2*>(to + column) = make_float2(x, y);
        } else {
          if (column < p.dim_v) to[column] = x;
          if (column + 1 < p.dim_v) to[column + 1] = y;
        }
      }
    }
}

}  // namespace
