// From a warpgroup's accumulators (layout: wgmma.cuh) straight to global memory, without a stop in shared memory.
#pragma once
#include "mma.cuh"

// Word i of lane t becomes word t of lane i, within the four lanes that share a row.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int t) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
    w[i] = t & 1 ? got : w[i];
    w[i + 1] = t & 1 ? w[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
    w[i] = t & 2 ? got : w[i];
    w[i + 2] = t & 2 ? w[i + 2] : got;
  }
}

// Writes columns [first, first + COLUMNS) of this thread's row r (0 or 1), which starts at `row` and is `dim` long.
// The four lanes of a row exchange their columns, so that each writes 16 bytes and together they fill whole sectors;
// all lanes of a warp take part, those with `inside` false without writing. Not WIDE: every lane writes its own pairs, which
// is sooner done where little is stored.
template <int COLUMNS, bool WIDE = true>
__device__ __forceinline__ void store_row(const float (&o)[COLUMNS / 2], int r, half_type* row, bool inside, int first, int dim) {
  const int t = threadIdx.x % 4;
  const bool aligned = aligned16(row + first, 0);
#pragma unroll
  for (int group = 0; group < (WIDE ? COLUMNS / 32 : 0); ++group) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (4 * group + i) + 2 * r;
      w[i] = pack_pair(o[at], o[at + 1]);
    }
    transpose_quad(w, t);
    if (inside) store_chunk(row, first + 32 * group + 8 * t, dim, aligned, make_uint4(w[0], w[1], w[2], w[3]));
  }
#pragma unroll
  for (int j = WIDE ? COLUMNS / 32 * 4 : 0; j < COLUMNS / 8; ++j) {
    const int column = first + 8 * j + 2 * t;
    const u32 pair = pack_pair(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
    if (inside && aligned && column + 2 <= dim) {
      *reinterpret_cast<u32*>(row + column) = pair;
    } else {
      if (inside && column < dim) reinterpret_cast<u16*>(row)[column] = u16(pair);
      if (inside && column + 1 < dim) reinterpret_cast<u16*>(row)[column + 1] = u16(pair >> 16);
    }
  }
}
