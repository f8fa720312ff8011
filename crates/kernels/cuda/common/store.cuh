// Output rows to global memory: 16 bytes at a time where the addresses allow them, element by element where they do not.
#pragma once
#include "copy.cuh"

// Eight output columns as 16 bytes, or element by element where the row is not aligned or ends early.
__device__ __forceinline__ void store_chunk(element* row, int column, int dim, bool aligned, uint4 bits) {
  if (aligned && column + 8 <= dim) {
    *reinterpret_cast<uint4*>(row + column) = bits;
  } else {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + j < dim) reinterpret_cast<u16*>(row)[column + j] = u16(words[j / 2] >> (16 * (j % 2)));
  }
}

// ---------------------------- from MMA accumulators (layout: mma.cuh), without a stop in shared memory

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

// Writes columns [first, first + COLUMNS) of those of this thread's two rows, each `dim` long, that need no more than 16 bytes at a time, and
// says whether that was all that is inside. All lanes of a warp take part, whose groups of four exchange their columns. For code that
// runs once, from a cold instruction cache: what other rows need is somewhere else.
template <int COLUMNS>
__device__ __forceinline__ bool store_whole_rows(const float (&o)[COLUMNS / 2], element* const (&row)[2], const bool (&inside)[2],
                                                 int first, int dim) {
  if (COLUMNS % 32 != 0 || first + COLUMNS > dim) return false;
  const int t = threadIdx.x % 4;
  const bool aligned[2] = {rows_are_16_byte_aligned(row[0] + first, 0), rows_are_16_byte_aligned(row[1] + first, 0)};
#pragma unroll
  for (int group = 0; group < COLUMNS / 32; ++group) {
    u32 w[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = 16 * group + 4 * (i % 4) + 2 * (i / 4);
      w[i / 4][i % 4] = pack_pair(o[at], o[at + 1]);
    }
    transpose_quad(w[0], t);
    transpose_quad(w[1], t);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (inside[r] && aligned[r])
        *reinterpret_cast<uint4*>(row[r] + first + 32 * group + 8 * t) = make_uint4(w[r][0], w[r][1], w[r][2], w[r][3]);
  }
  return (aligned[0] || !inside[0]) && (aligned[1] || !inside[1]);
}

// Writes columns [first, first + COLUMNS) of this thread's row r (0 or 1), which starts at `row` and is `dim` long.
// The four lanes of a row exchange their columns, so that each writes 16 bytes and together they fill whole sectors;
// all lanes of a warp take part, those with `inside` false without writing.
template <int COLUMNS>
__device__ __forceinline__ void store_row(const float (&o)[COLUMNS / 2], int r, element* row, bool inside, int first, int dim) {
  const int t = threadIdx.x % 4;
  const bool aligned = rows_are_16_byte_aligned(row + first, 0);
#pragma unroll
  for (int group = 0; group < COLUMNS / 32; ++group) {
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
  for (int j = COLUMNS / 32 * 4; j < COLUMNS / 8; ++j) {
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
