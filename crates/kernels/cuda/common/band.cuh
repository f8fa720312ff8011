// Questions about the band of visible keys (SdpaParams.band_lo, band_hi), without overflow for unbounded bands.
#pragma once
#include "params.h"

__device__ __forceinline__ int visible_keys(const SdpaParams& p, int row) {
  return min(p.seq_kv - 1, row + p.band_hi) - max(0, row + p.band_lo) + 1;
}

// The count rises, stays and falls along the rows, so the fewest are at one of the ends.
__device__ __forceinline__ bool any_row_sees_fewer(const SdpaParams& p, int first_row, int last_row, int keys) {
  return min(visible_keys(p, first_row), visible_keys(p, last_row)) < keys;
}

// Whether a tile of keys [n0, n0 + keys) holds a key hidden from one of the rows.
__device__ __forceinline__ bool tile_needs_mask(const SdpaParams& p, int first_row, int last_row, int n0, int keys) {
  return n0 < last_row + p.band_lo || n0 + keys - 1 > first_row + p.band_hi || n0 + keys > p.seq_kv;
}
