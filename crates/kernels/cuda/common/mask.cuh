// Every mask of the project is a band: key j is visible to query i iff
// i + band_lo <= j <= i + band_hi. Full, causal (either alignment) and sliding
// window differ only in the two numbers.
#pragma once

#include "dtype.cuh"
#include "params.h"

// A half-open range of keys or of KV tiles; empty when begin >= end.
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

// The KV tiles that at least one of the rows [first_row, last_row] may see. Both
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

// True when a key of the tile is hidden from one of the rows.
__device__ __forceinline__ bool tile_needs_mask(const SdpaParams& p, int first_row, int last_row, int first_key, int keys) {
  return first_key < last_row + p.band_lo || first_key + keys - 1 > first_row + p.band_hi || first_key + keys > p.seq_kv;
}

// True when none of the rows sees any of the keys: nothing is to be done.
__device__ __forceinline__ bool none_visible(const SdpaParams& p, int first_row, int last_row,
                                             int first_key, int keys) {
  return first_key > last_row + p.band_hi || first_key + keys - 1 < first_row + p.band_lo ||
         first_key >= p.seq_kv;
}

// Whether one of the rows sees fewer than `keys` keys. The count rises, stays and falls along
// the rows, so the fewest are at one of the ends.
__device__ __forceinline__ int visible_key_count(const SdpaParams& p, int row) {
  return min(p.seq_kv - 1, row + p.band_hi) - max(0, row + p.band_lo) + 1;
}
__device__ __forceinline__ bool any_row_sees_fewer(const SdpaParams& p, int first_row, int last_row, int keys) {
  return min(visible_key_count(p, first_row), visible_key_count(p, last_row)) < keys;
}

// --------------------------------------------------- masks on MMA accumulators (layout: mma.cuh)

// A thread's columns of one row lie at 0, 1, 8, 9, 16, 17, … from its first: how many of them lie before `column`.
__device__ __forceinline__ int columns_before(int column) { return column <= 0 ? 0 : 2 * (column >> 3) + min(column & 7, 2); }

// The lowest `count` bits, 0 to 32.
__device__ __forceinline__ u32 low_bits(int count) { return count <= 0 ? 0u : ~0u >> max(0, 32 - count); }

// Calls visit(i, visible) for every score. Hidden is what lies outside [row + band_lo, row + band_hi] or past the last key. `rows` are
// this thread's two query positions, `column` is the key of its first accumulator. What is visible is worked out once as a word of bits,
// which become predicates several at a time: half as many instructions as a comparison for each score.
template <int N, typename Visit>
__device__ __forceinline__ void visit_visible(const int (&rows)[2], int column, int band_lo, int band_hi, int seq_kv, Visit visit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = columns_before(min(rows[r] + band_hi, seq_kv - 1) - column + 1);
    const int begin = columns_before(rows[r] + band_lo - column);
#pragma unroll
    for (int word = 0; word < (N + 127) / 128; ++word) {
      const u32 visible = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int j = 16 * word + i / 2;
        if (j < N / 8) visit(4 * j + 2 * r + i % 2, bool(visible >> i & 1));
      }
    }
  }
}

// Hides scores.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N / 2], const int (&rows)[2], int column, int band_lo, int band_hi, int seq_kv) {
  visit_visible<N>(rows, column, band_lo, band_hi, seq_kv, [&](int i, bool visible) {
    if (!visible) s[i] = NEG_INF;
  });
}

// The same before there are scores: QKᵀ is then added to zero, or to an infinity that stays one.
template <int N>
__device__ __forceinline__ void mask_in_advance(float (&s)[N / 2], const int (&rows)[2], int column, int band_lo, int band_hi,
                                                int seq_kv) {
  visit_visible<N>(rows, column, band_lo, band_hi, seq_kv, [&](int i, bool visible) { s[i] = visible ? 0.f : NEG_INF; });
}

