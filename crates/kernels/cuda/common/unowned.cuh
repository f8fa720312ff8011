// Rows of O that belong to no sequence: in front of the first packed one, behind the queries that a sequence uses, behind the last one.
// They become zeros, and their log-sum-exp -inf, so that nobody has to clear O before a launch. What they are only the device knows.
#pragma once
#include "lse.cuh"
#include "sequence.cuh"
#include "store.cuh"

struct RowRange {
  int first, end;
};

// Behind sequence `number - 1`, in whose block they lie; of packed ones, number 0 is in front of the first.
__device__ __forceinline__ RowRange unowned_rows(const SdpaParams& p, int number) {
  if (!p.cu_seqlens_q) return number == 0 ? RowRange{0, 0} : RowRange{tokens_q(p, number - 1).count, p.seq_q};
  const int end = number == p.batch ? p.tokens_q : min(max(p.cu_seqlens_q[number], 0), p.tokens_q);
  if (number == 0) return {0, end};
  const Tokens own = tokens_q(p, number - 1);
  return {own.first + own.count, end};
}

// 16 bytes of a row.
__device__ __forceinline__ void clear_chunk(element* row, int column, int dim) {
  store_chunk(row, column, dim, rows_are_16_byte_aligned(row, 0), make_uint4(0, 0, 0, 0));
}
__device__ __forceinline__ void clear_chunk(float* row, int column, int dim) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < dim) row[column + i] = 0.f;
}

// By a whole warp.
template <typename T>
__device__ __forceinline__ void clear_row(const SdpaParams& p, int sequence, int row) {
  constexpr int CHUNK_COLUMNS = 16 / sizeof(T);
  const int lane = threadIdx.x % 32, chunks = (p.dim_v + CHUNK_COLUMNS - 1) / CHUNK_COLUMNS;
  for (int at = lane; at < p.heads_q * chunks; at += 32) {
    T* o = head_of(static_cast<T*>(p.o), p.o_stride, sequence, at / chunks) + row * p.o_stride[2];
    clear_chunk(o, at % chunks * CHUNK_COLUMNS, p.dim_v);
  }
  if (p.lse)
    for (int head = lane; head < p.heads_q; head += 32) LSE_OF(p, sequence, head, row) = NEG_INF;
}

// By warp `writer` of all `writers` of a launch, which take the rows in turns. Its lanes look at 32 sequences at a time. T: what O is made of.
template <typename T = element>
__device__ __forceinline__ void clear_unowned_rows(const SdpaParams& p, u32 writer, u32 writers) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int number = 0; number <= p.batch; number += 32) {
    RowRange rows = {0, 0};
    if (number + lane <= p.batch) rows = unowned_rows(p, number + lane);
    for (u32 left = __ballot_sync(~0u, rows.first < rows.end); left; left &= left - 1) {
      const int from = __ffs(left) - 1, sequence = number + from - 1;
      const int first = __shfl_sync(~0u, rows.first, from), end = __shfl_sync(~0u, rows.end, from);
      const u32 turn = (u32(first) + (p.cu_seqlens_q ? 0u : u32(sequence) * u32(p.seq_q))) % writers;
#pragma unroll 1
      for (int row = first + int((writer + writers - turn) % writers); row < end; row += int(writers)) clear_row<T>(p, sequence, row);
    }
  }
}
