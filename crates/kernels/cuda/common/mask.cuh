// Every mask of the project is a band: key j is visible to query i iff
// i + band_lo <= j <= i + band_hi. Full, causal (either alignment) and sliding
// window differ only in the two numbers. Attention chunks cut the band once more.
//
// `Bounds` are the parameters themselves, or what is asked of one sequence (sequence.cuh).
#pragma once

#include "dtype.cuh"
#include "params.h"

// A half-open range of keys or of KV tiles; empty when begin >= end.
struct KeyRange {
  int begin;
  int end;
};

// The first and the last key that the mask lets query `row` see, be there such a key or not. Both grow with the row.
__device__ __forceinline__ int band_first(const SdpaParams& p, int row) { return row + p.band_lo; }
__device__ __forceinline__ int band_last(const SdpaParams& p, int row) { return row + p.band_hi; }

// The band by value: read once, before the scores are looked at.
struct Edges {
  int lo, hi, seq_kv;
};
__device__ __forceinline__ Edges edges_of(const SdpaParams& p) { return {p.band_lo, p.band_hi, p.seq_kv}; }
__device__ __forceinline__ int band_first(const Edges& e, int row) { return row + e.lo; }
__device__ __forceinline__ int band_last(const Edges& e, int row) { return row + e.hi; }

// Whether keys may be hidden on the left.
__device__ __forceinline__ bool has_left_edge(const SdpaParams& p) { return p.band_lo > SDPA_BAND_UNBOUNDED_LO; }

// The keys that query `row` may see.
template <typename Bounds>
__device__ __forceinline__ KeyRange visible_keys(const Bounds& p, int row) {
  return {max(0, band_first(p, row)), min(p.seq_kv, band_last(p, row) + 1)};
}

__device__ __forceinline__ bool is_visible(const SdpaParams& p, int row, int key) {
  return key >= row + p.band_lo && key <= row + p.band_hi && key < p.seq_kv;
}

// The KV tiles that at least one of the rows [first_row, last_row] may see. Both
// limits grow with the row, so the first row gives the begin and the last the end.
template <typename Bounds>
__device__ __forceinline__ KeyRange visible_tiles(const Bounds& p, int first_row, int last_row, int tile_keys) {
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
template <typename Bounds>
__device__ __forceinline__ bool tile_needs_mask(const Bounds& p, int first_row, int last_row, int first_key, int keys) {
  return first_key < band_first(p, last_row) || first_key + keys - 1 > band_last(p, first_row) || first_key + keys > p.seq_kv;
}

// True when none of the rows sees any of the keys: nothing is to be done.
__device__ __forceinline__ bool none_visible(const SdpaParams& p, int first_row, int last_row,
                                             int first_key, int keys) {
  return first_key > last_row + p.band_hi || first_key + keys - 1 < first_row + p.band_lo ||
         first_key >= p.seq_kv;
}

// Whether one of the rows sees fewer than `keys` keys. The count rises, stays and falls along
// the rows, so the fewest are at one of the ends.
template <typename Bounds>
__device__ __forceinline__ int visible_key_count(const Bounds& p, int row) {
  return min(p.seq_kv - 1, band_last(p, row)) - max(0, band_first(p, row)) + 1;
}
__device__ __forceinline__ bool any_row_sees_fewer(const SdpaParams& p, int first_row, int last_row, int keys) {
  return min(visible_key_count(p, first_row), visible_key_count(p, last_row)) < keys;
}

// --------------------------------------------------- masks on MMA accumulators (layout: mma.cuh)

// A thread's columns of one row lie at 0, 1, 8, 9, 16, 17, … from its first: how many of them lie before `column`.
__device__ __forceinline__ int columns_before(int column) { return column <= 0 ? 0 : 2 * (column >> 3) + min(column & 7, 2); }

// The lowest `count` bits, 0 to 32.
__device__ __forceinline__ u32 low_bits(int count) { return count <= 0 ? 0u : ~0u >> max(0, 32 - count); }

// Calls visit(i, visible) for every score. Hidden is what lies outside the band or past the last key. `rows` are
// this thread's two query positions, `column` is the key of its first accumulator. What is visible is worked out once as a word of bits,
// which become predicates several at a time: half as many instructions as a comparison for each score.
template <int N, typename Bounds, typename Visit>
__device__ __forceinline__ void visit_visible(const Bounds& bounds, const int (&rows)[2], int column, Visit visit) {
  const auto p = edges_of(bounds);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = columns_before(min(band_last(p, rows[r]), p.seq_kv - 1) - column + 1);
    const int begin = columns_before(band_first(p, rows[r]) - column);
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
template <int N, typename Bounds>
__device__ __forceinline__ void mask_scores(const Bounds& p, float (&s)[N / 2], const int (&rows)[2], int column) {
  visit_visible<N>(p, rows, column, [&](int i, bool visible) {
    if (!visible) s[i] = NEG_INF;
  });
}

// The same before there are scores: QKᵀ is then added to zero, or to an infinity that stays one.
template <int N, typename Bounds>
__device__ __forceinline__ void mask_in_advance(const Bounds& p, float (&s)[N / 2], const int (&rows)[2], int column) {
  visit_visible<N>(p, rows, column, [&](int i, bool visible) { s[i] = visible ? 0.f : NEG_INF; });
}

