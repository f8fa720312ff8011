// A block mask: the KV tiles that a Q tile sees, by its row of the block table. Tiles lie within blocks.
#pragma once
#include "dtype.cuh"
#include "params.h"

// A Q tile's row of the table, and the end of the KV tiles that count.
template <bool MASKED>
struct BlockWork {
  static constexpr const unsigned char* table_row = nullptr;
  static constexpr int tile_end = 0;
  __device__ __forceinline__ void set_blocks(const unsigned char*, int) {}
};
template <>
struct BlockWork<true> {
  const unsigned char* table_row;
  int tile_end;
  __device__ __forceinline__ void set_blocks(const unsigned char* row, int end) { table_row = row, tile_end = end; }
};

__device__ __forceinline__ const unsigned char* block_row(const SdpaParams& p, int batch, int head, int m0) {
  const long long rows = (p.seq_q + p.block_q - 1) / p.block_q, columns = (p.seq_kv + p.block_kv - 1) / p.block_kv;
  const long long table = (long long)batch * p.block_batch_tables + head * p.block_head_tables;
  return p.blocks + (table * rows + m0 / p.block_q) * columns;
}

// Whether a KV tile, one of each lane, is below `end` and seen: a bit for each of 32.
template <int TILE_KEYS>
__device__ __forceinline__ u32 seen_tiles(const SdpaParams& p, const unsigned char* row, int tile, int end) {
  return __ballot_sync(~0u, tile < end && row[tile * TILE_KEYS / p.block_kv]);
}
