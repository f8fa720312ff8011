// Every mask of the project is a band: key j is visible to query i iff
// i + band_lo <= j <= i + band_hi. Full, causal (either alignment) and sliding
// window differ only in the two numbers.
#pragma once

#include "params.h"

// A half-open range of keys or of key tiles; empty when begin >= end.
struct KeyRange {
  int begin;
  int end;
};

// The keys that query `row` may see.
__device__ __forceinline__ KeyRange visible_keys(const SdpaParams& p, int row) {
  return {max(0, row + p.band_lo), min(p.seq_kv, row + p.band_hi + 1)};
}

__device__ __forceinline__ bool is_visible(const SdpaParams& p, int row, int key) {
  return key >= row + p.band_lo && key <= row + p.band_hi && key < p.seq_kv;
}

// The key tiles that at least one of the rows [first_row, last_row] may see. Both
// limits grow with the row, so the first row gives the begin and the last the end.
__device__ __forceinline__ KeyRange visible_tiles(const SdpaParams& p, int first_row, int last_row,
                                                  int tile_keys) {
  const int begin = visible_keys(p, first_row).begin;
  const int end = visible_keys(p, last_row).end;
  if (begin >= end) return {0, 0};
  return {begin / tile_keys, (end + tile_keys - 1) / tile_keys};
}

// True when each of the rows sees each of the keys [first_key, first_key + keys):
// such a tile needs no per-element test.
__device__ __forceinline__ bool all_visible(const SdpaParams& p, int first_row, int last_row,
                                            int first_key, int keys) {
  return first_key >= last_row + p.band_lo && first_key + keys - 1 <= first_row + p.band_hi &&
         first_key + keys <= p.seq_kv;
}

// True when none of the rows sees any of the keys: nothing is to be done.
__device__ __forceinline__ bool none_visible(const SdpaParams& p, int first_row, int last_row,
                                             int first_key, int keys) {
  return first_key > last_row + p.band_hi || first_key + keys - 1 < first_row + p.band_lo ||
         first_key >= p.seq_kv;
}
