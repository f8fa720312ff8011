// cache_write: which sequence a token belongs to, and where in the cache it goes.
//
// Lengths, pages and indices are read on the device: no host knows them. Whatever they hold, nothing outside the caches is written: a
// token without a place in them is left out.
#pragma once
#include "cache_params.h"

namespace {

// A token: its sequence, its number among the sequence's, and its place among all of them.
struct Token {
  int sequence, number;
  int block, row;
};

// The sequence that packed token `row` belongs to: the last that begins at or before it. -1: none.
__device__ __forceinline__ int sequence_of(const int* cumulative, int batch, int row) {
  int low = 0, high = batch;  // cumulative[low] <= row, if any is; cumulative[high] > row, or high is the end
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (cumulative[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return cumulative[low] >= 0 && cumulative[low] <= row && row < cumulative[low + 1] ? low : -1;
}

// Token `index` of a tensor with `tokens` of them, of each sequence or packed in all. False: it belongs to no sequence.
__device__ __forceinline__ bool find_token(const int* cumulative, int batch, int tokens, int index, Token& token) {
  if (!cumulative) {
    token = {index / tokens, index % tokens, index / tokens, index % tokens};
    return true;
  }
  const int sequence = sequence_of(cumulative, batch, index);
  if (sequence < 0) return false;
  token = {sequence, index - cumulative[sequence], 0, index};
  return true;
}

__device__ __forceinline__ long long capacity(const CacheParams& p) {
  return p.page_table ? (long long)p.columns_used * p.room : p.room;
}

// A place in the cache.
struct Place {
  int block, row;
};

// Where the sequence's token `number` behind those it holds goes. False: there is no such place.
__device__ __forceinline__ bool find_place(const CacheParams& p, int sequence, int number, Place& place) {
  const int held = p.lengths[sequence];
  const long long position = (long long)held + number;
  if (held < 0 || position >= capacity(p)) return false;
  const int block = p.cache_batch_idx ? p.cache_batch_idx[sequence] : sequence;
  if (block < 0 || block >= (p.page_table ? p.table_rows : p.blocks)) return false;
  if (!p.page_table) {
    place = {block, int(position)};
    return true;
  }
  const int index = int(position) / p.room;
  const int page = p.page_table[block * p.page_table_stride + index];
  place = {page, int(position) - index * p.room};
  return page >= 0 && page < p.blocks;
}

// How many tokens a sequence holds with its new ones; what has no place is not counted.
__device__ __forceinline__ int filled_length(const CacheParams& p, int sequence) {
  const int* cumulative = p.cu_seqlens_new;
  const long long added = cumulative ? (long long)cumulative[sequence + 1] - cumulative[sequence] : p.tokens_new;
  const long long held = max(p.lengths[sequence], 0);
  return int(min(held + max(added, 0ll), capacity(p)));
}

}  // namespace
