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

// Writes this thread's two rows. `head` is the first row of the head; rows from `row_end` on are left alone.
// The four lanes of a row exchange their columns, so that each writes 16 bytes and together they fill whole sectors.
template <int DIM>
__device__ __forceinline__ void store_rows(const float (&o)[DIM / 2], half_type* head, long long stride,
                                           const int (&rows)[2], int row_end, int dim) {
  const int t = threadIdx.x % 4;
  const bool aligned = aligned16(head, stride);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    half_type* row = head + rows[r] * stride;
#pragma unroll
    for (int group = 0; group < DIM / 32; ++group) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * group + i) + 2 * r;
        w[i] = pack_pair(o[at], o[at + 1]);
      }
      transpose_quad(w, t);
      if (rows[r] < row_end) store_chunk(row, 32 * group + 8 * t, dim, aligned, make_uint4(w[0], w[1], w[2], w[3]));
    }
    if (DIM % 32 != 0 && rows[r] < row_end) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * (DIM / 32 * 4 + i) + 2 * r;
        const int column = DIM / 32 * 32 + 8 * i + 2 * t;
        const u32 pair = pack_pair(o[at % (DIM / 2)], o[(at + 1) % (DIM / 2)]);
        if (column < dim) reinterpret_cast<u16*>(row)[column] = u16(pair);
        if (column + 1 < dim) reinterpret_cast<u16*>(row)[column + 1] = u16(pair >> 16);
      }
    }
  }
}
