// flash_decode: Q tiles, their KV tiles, and which of them are a CTA's.
//
// The KV tiles of every Q tile of every sequence are numbered: sequence by sequence, key head by key head. A unit is a KV tile, and every
// CTA gets an equal run of units; with a fixed split (SPLIT_KEYS) a unit is so many keys of one Q tile, whatever else is in the batch.
#pragma once
#include "layout.cuh"
#include "sequence.cuh"

namespace {

constexpr bool OWN_LENGTHS = PACKED_QUERIES || PACKED_KEYS || USED_LENGTHS;
constexpr int SPLIT_TILES = SPLIT_KEYS / BLOCK_N;
static_assert(SPLIT_KEYS % BLOCK_N == 0, "splits are whole KV tiles");

// One sequence: its Q tiles, and the keys that its queries see.
struct Asked {
  Sequence bounds;
  int m_blocks;            // Q tiles of a key head
  int key_first, key_end;  // what some row sees
  int tiles;               // of those keys; one where there is none, since somebody must write the rows

  __device__ __forceinline__ Asked() {}
  __device__ __forceinline__ Asked(const SdpaParams& p, int batch) : bounds(sequence_of<OWN_LENGTHS>(p, batch)) {
    m_blocks = (bounds.seq_q * (p.heads_q / p.heads_kv) + ROWS - 1) / ROWS;
    key_first = max(0, band_first(bounds, 0));
    key_end = min(bounds.seq_kv, band_last(bounds, bounds.seq_q - 1) + 1);
    tiles = max(1, (key_end - key_first + BLOCK_N - 1) / BLOCK_N);
  }
};

// How all units are shared out.
struct Division {
  int split;  // KV tiles of a unit; 0: every unit is one, and a CTA's are worked on together
  int units;  // of all sequences
  int ctas;   // that get some

  // Units of one Q tile.
  __device__ __forceinline__ int units_of_tile(const Asked& asked) const {
    return split ? (asked.tiles + split - 1) / split : asked.tiles;
  }
  __device__ __forceinline__ int units_of(const SdpaParams& p, const Asked& asked) const {
    return units_of_tile(asked) * asked.m_blocks * p.heads_kv;
  }
  // The first unit of a CTA, and the CTA of a unit.
  __device__ __forceinline__ int first_unit(int cta) const { return int((long long)units * cta / ctas); }
  __device__ __forceinline__ int cta_of(int unit) const { return int(((long long)(unit + 1) * ctas - 1) / units); }

  __device__ __forceinline__ explicit Division(const SdpaParams& p) {
    // Without a workspace nothing can be merged: whole Q tiles.
    split = p.workspace ? SPLIT_TILES : 1 << 30;
    if (!OWN_LENGTHS) {
      units = units_of(p, Asked(p, 0)) * p.batch;
    } else {
      units = 0;
      for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) units += units_of(p, Asked(p, batch));
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) units += __shfl_xor_sync(~0u, units, lanes);
    }
    ctas = min(int(gridDim.x), units);
  }
};

// A CTA's way through its units, one Q tile or part of one at a time (a segment). All lanes of a warp move together.
struct Cursor {
  int unit, unit_end;
  int batch;
  int inside;  // the unit's number in its sequence
  Asked asked;
  int head_kv, m_block;
  int tile, tile_end;  // the segment's KV tiles
  int unit_first;      // the Q tile's first unit

  __device__ __forceinline__ bool valid() const { return unit < unit_end; }
  // Whether a Q tile is worked on by this CTA alone, in one go.
  __device__ __forceinline__ bool whole() const { return tile == 0 && tile_end == asked.tiles; }

  __device__ __forceinline__ Cursor(const SdpaParams& p, const Division& division) {
    unit = unit_end = 0;
    if (int(blockIdx.x) >= division.ctas) return;
    unit = division.first_unit(blockIdx.x);
    unit_end = division.first_unit(blockIdx.x + 1);
    find_sequence(p, division);
    asked = Asked(p, batch);
    enter_segment(p, division);
  }

  __device__ __forceinline__ void next(const SdpaParams& p, const Division& division) {
    const int taken = division.split ? 1 : tile_end - tile;
    unit += taken;
    inside += taken;
    if (!valid()) return;
    if (inside == division.units_of(p, asked)) {
      inside = 0;
      do ++batch;
      while (asked = Asked(p, batch), asked.m_blocks == 0);
    }
    enter_segment(p, division);
  }

 private:
  // The sequence that `unit` lies in: 32 at a time, where their lengths are their own.
  __device__ __forceinline__ void find_sequence(const SdpaParams& p, const Division& division) {
    if (!OWN_LENGTHS) {
      const int each = division.units_of(p, Asked(p, 0));
      batch = unit / each;
      inside = unit - batch * each;
      return;
    }
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0;; first += 32) {
      int up_to_here = first + lane < p.batch ? division.units_of(p, Asked(p, first + lane)) : 0;
      const int own = up_to_here;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int sum = __shfl_up_sync(~0u, up_to_here, lanes);
        if (lane >= lanes) up_to_here += sum;
      }
      const u32 behind = __ballot_sync(~0u, unit < before + up_to_here);
      if (behind) {
        const int found = __ffs(behind) - 1;
        batch = first + found;
        inside = unit - before - __shfl_sync(~0u, up_to_here - own, found);
        return;
      }
      before += __shfl_sync(~0u, up_to_here, 31);
    }
  }

  __device__ __forceinline__ void enter_segment(const SdpaParams& p, const Division& division) {
    const int each = division.units_of_tile(asked);
    const int number = inside / each;
    const int at = inside - number * each;
    unit_first = unit - at;
    head_kv = number / asked.m_blocks;
    m_block = number - head_kv * asked.m_blocks;
    if (division.split) {
      tile = at * division.split;
      tile_end = asked.tiles - tile > division.split ? tile + division.split : asked.tiles;
    } else {
      tile = at;
      tile_end = at + min(each - at, unit_end - unit);
    }
  }
};

}  // namespace
