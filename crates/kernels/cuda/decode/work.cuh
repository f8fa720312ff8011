// flash_decode: Q tiles, their KV tiles, and which of them are a CTA's.
//
// The KV tiles of every Q tile of every sequence are numbered: sequence by sequence, key head by key head. A unit is a KV tile, and every
// CTA gets an equal run of units. With a fixed split (SPLIT_KEYS) a unit is so many keys of one Q tile, or twice as many as often as it
// takes to leave no more than SPLITS_MAX units: that follows from the sequence's own length, whatever else is in the batch.
// With clusters (CLUSTERED) a cluster has one Q tile, whose KV tiles its CTAs share: where it lies in the grid says which.
#pragma once
#include "cluster.cuh"
#include "copy.cuh"
#include "layout.cuh"
#include "sequence.cuh"

namespace {

constexpr bool OWN_LENGTHS = PACKED_QUERIES || PACKED_KEYS || USED_LENGTHS;
constexpr int SPLIT_TILES = SPLIT_KEYS / BLOCK_N;
constexpr int SPLITS_MAX = 32;
static_assert(SPLIT_KEYS % BLOCK_N == 0 && (SPLIT_TILES & (SPLIT_TILES - 1)) == 0, "splits are whole KV tiles, a power of two of them");

// The logarithm of the number of CTAs of a cluster.
__device__ __forceinline__ int cluster_ctas_log2() { return 31 - __clz(cluster_size()); }

// Whether sequences have numbers of queries of their own.
__device__ __forceinline__ bool own_queries(const SdpaParams& p) { return PACKED_QUERIES || USED_LENGTHS && p.seqused_q; }

// Query heads of a key head. Computed where it is needed: registers are for O.
__device__ __forceinline__ int group_of(const SdpaParams& p) { return u32(p.heads_q) / u32(p.heads_kv); }

// One sequence: its Q tiles, and the keys that its queries see.
struct Asked {
  Sequence bounds;
  int m_blocks;            // Q tiles of a key head
  int key_first, key_end;  // what some row sees
  int tiles;               // of those keys; one where there is none, since somebody must write the rows

  __device__ __forceinline__ Asked() {}
  __device__ __forceinline__ Asked(const SdpaParams& p, int batch, int group) : bounds(sequence_of<OWN_LENGTHS>(p, batch)) {
    m_blocks = (bounds.seq_q * group + ROWS - 1) / ROWS;
    key_first = max(0, band_first(bounds, 0));
    key_end = min(bounds.seq_kv, band_last(bounds, bounds.seq_q - 1) + 1);
    tiles = max(1, (key_end - key_first + BLOCK_N - 1) / BLOCK_N);
  }
};

// Which query, and which of a key head's query heads, a row of all Q tiles is. Mostly there is one query: rows past it are past the last as well.
struct PackedRow {
  int query, head;
  __device__ __forceinline__ PackedRow(const SdpaParams& p, int row) {
    const int group = group_of(p);
    query = WARPS_M == 1 && p.seq_q == 1 ? row >= group : row / u32(group);
    head = row - query * group;
  }
};

// How all units are shared out among CTAs that are no cluster.
struct Division {
  int group;          // query heads of a key head
  bool in_parts;      // without a workspace nothing can be merged: whole Q tiles
  int units;          // of all sequences
  int first_units;    // of the sequence of this lane's number, where lengths are data
  int ctas;           // that get some
  int length;         // units of a Q tile, where all are of one length and a CTA has whole ones or one part; 0: evenly, wherever they begin and end
  int parts;          // CTAs that share a Q tile then; 0: whole ones are dealt out in turns, so that heads of a token are read at one time

  // KV tiles of a unit where splits are fixed.
  __device__ __forceinline__ int split_of(const Asked& asked) const {
    const int doubled = (asked.tiles - 1) / max(1, SPLIT_TILES * SPLITS_MAX);
    return SPLIT_TILES << (32 - __clz(doubled));
  }
  __device__ __forceinline__ bool whole_tiles() const { return CLUSTERED || !in_parts; }
  // Units of one Q tile.
  __device__ __forceinline__ int units_of_tile(const Asked& asked) const {
    if (whole_tiles()) return 1;
    if (SPLIT_TILES == 0) return asked.tiles;
    const int split = split_of(asked);
    return (asked.tiles + split - 1) >> (31 - __clz(split));
  }
  __device__ __forceinline__ int units_of(const SdpaParams& p, const Asked& asked) const {
    return units_of_tile(asked) * asked.m_blocks * p.heads_kv;
  }
  __device__ __forceinline__ bool dealt() const { return length > 0 && parts == 0; }
  // Where a CTA's units begin and end; of those that are dealt out, the first.
  __device__ __forceinline__ void units_of_cta(int cta, int& first, int& end) const {
    if (dealt()) {
      first = cta * length;
      end = units;
    } else if (parts) {
      const int tile = cta / u32(parts), part = cta - tile * parts;
      const int each = length / u32(parts), longer = length - each * parts;
      first = tile * length + part * each + min(part, longer);
      end = first + each + (part < longer);
    } else {
      // units · cta / ctas in 32 bits
      const int each = units / u32(ctas), rest = units - each * ctas;
      first = each * cta + rest * cta / u32(ctas);
      end = each * (cta + 1) + rest * (cta + 1) / u32(ctas);
    }
  }
  // The first and the last CTA that have units of a Q tile which several have.
  __device__ __forceinline__ int first_cta(int first_unit) const {
    return parts ? first_unit / u32(length) * parts : cta_of(first_unit);
  }
  __device__ __forceinline__ int last_cta(int first_cta, int last_unit) const {
    return parts ? first_cta + parts - 1 : cta_of(last_unit);
  }
  __device__ __forceinline__ int cta_of(int unit) const { return int(((long long)(unit + 1) * ctas - 1) / units); }

  __device__ __forceinline__ explicit Division(const SdpaParams& p) : group(opaque(group_of(p))) {}  // computed here, and once

  // Reads lengths, where they are data.
  __device__ __forceinline__ void count(const SdpaParams& p) {
    if (CLUSTERED) return;
    in_parts = p.workspace != nullptr;
    int fewest, most;  // units of a Q tile
    int least;         // of a sequence
    if (!OWN_LENGTHS) {
      const Asked all(p, 0, group);
      least = units_of(p, all);
      units = least * p.batch;
      fewest = most = units_of_tile(all);
    } else {
      units = first_units = 0, fewest = least = 1 << 30, most = 0;
      for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
        const Asked asked(p, batch, group);
        const int own = units_of(p, asked);
        units += own;
        if (batch < 32) first_units = own;
        least = min(least, own);
        if (asked.m_blocks == 0) continue;
        fewest = min(fewest, units_of_tile(asked));
        most = max(most, units_of_tile(asked));
      }
      units = __reduce_add_sync(~0u, units);
      least = __reduce_min_sync(~0u, least);
      fewest = __reduce_min_sync(~0u, fewest);
      most = __reduce_max_sync(~0u, most);
    }
    ctas = min(int(gridDim.x), units);
    length = parts = 0;
    if (SPLIT_TILES > 0 || units == 0 || fewest != most) return;
    const int q_tiles = units / u32(most);
    if (q_tiles >= ctas) {
      // As many for every CTA, or one less: then nothing has to be merged.
      const int each = (q_tiles + ctas - 1) / u32(ctas);
      if (16ll * q_tiles < 15ll * each * ctas || least * p.batch != units) return;
      length = most;
    } else if (VALUE_DIM <= 128) {  // O of wider ones leaves no register for it
      // As many CTAs for each: then none has parts of two.
      const int each = min(most, ctas / u32(q_tiles));
      if (each < most && 16 * q_tiles * each < 15 * ctas) return;
      parts = each;
      length = most;
      ctas = q_tiles * each;
    }
  }
};

// A CTA's way through its units, one Q tile or part of one at a time (a segment). All lanes of a warp move together.
struct Cursor {
  int unit, unit_end;
  int at;  // the unit's number in its Q tile
  int batch;
  Asked asked;
  int head_kv, m_block;
  int tile, tile_end;  // the segment's KV tiles

  __device__ __forceinline__ bool valid() const { return unit < unit_end; }
  // Whether a Q tile is worked on by this CTA alone, in one go.
  __device__ __forceinline__ bool whole() const { return tile == 0 && tile_end == asked.tiles; }

  __device__ __forceinline__ Cursor() {}
  __device__ __forceinline__ Cursor(const SdpaParams& p, const Division& division) {
    unit = unit_end = tile = tile_end = 0;
    if (CLUSTERED) {
      enter_cluster(p, division);
      return;
    }
    const int cta = blockIdx.x;
    if (cta >= division.ctas) return;
    division.units_of_cta(cta, unit, unit_end);
    const int inside = find_sequence(p, division);
    asked = Asked(p, batch, division.group);
    const int each = division.units_of_tile(asked);
    const int number = inside / u32(each);
    at = inside - number * each;
    head_kv = asked.m_blocks == 1 ? number : number / u32(asked.m_blocks);  // mostly there is one query
    m_block = number - head_kv * asked.m_blocks;
    enter_segment(division);
  }

  __device__ __forceinline__ void next(const SdpaParams& p, const Division& division) {
    const int taken = SPLIT_TILES > 0 || division.whole_tiles() ? 1 : tile_end - tile;
    unit += division.dealt() ? division.length * division.ctas : taken;
    at += taken;
    if (!valid()) return;
    if (division.dealt()) {
      at = 0;
      const int each = asked.m_blocks * p.heads_kv;
      const int number = head_kv * asked.m_blocks + m_block + division.ctas, sequences = number / u32(each);
      head_kv = (number - sequences * each) / u32(asked.m_blocks);
      m_block = number - sequences * each - head_kv * asked.m_blocks;
      batch += sequences;
      if (sequences > 0) asked = Asked(p, batch, group_of(p));
    } else if (at == division.units_of_tile(asked)) {
      at = 0;
      if (++m_block == asked.m_blocks) {
        m_block = 0;
        if (++head_kv == p.heads_kv) {
          head_kv = 0;
          do ++batch;
          while (asked = Asked(p, batch, group_of(p)), asked.m_blocks == 0);
        }
      }
    }
    enter_segment(division);
  }

 private:
  // The grid is CTAs of all Q tiles of a key head, key heads, sequences: nobody counts, and nobody waits for lengths of others.
  __device__ __forceinline__ void enter_cluster(const SdpaParams& p, const Division& division) {
    const int ctas_log2 = cluster_ctas_log2(), rank = cluster_rank();
    batch = blockIdx.z;
    head_kv = blockIdx.y;
    m_block = blockIdx.x >> ctas_log2;
    at = 0;
    asked = Asked(p, batch, division.group);
    unit_end = !own_queries(p) || m_block < asked.m_blocks;
    const int share = asked.tiles >> ctas_log2, longer = asked.tiles - (share << ctas_log2);
    tile = rank * share + min(rank, longer);
    tile_end = tile + share + (rank < longer);
  }

  // The sequence that `unit` lies in: 32 at a time, where their lengths are their own. Gives the unit's number in it.
  __device__ __forceinline__ int find_sequence(const SdpaParams& p, const Division& division) {
    if (!OWN_LENGTHS) {
      const int each = division.units_of(p, Asked(p, 0, division.group));
      batch = unit / u32(each);
      return unit - batch * each;
    }
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0;; first += 32) {
      int up_to_here = first == 0 ? division.first_units : first + lane < p.batch ? division.units_of(p, Asked(p, first + lane, division.group)) : 0;
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
        return unit - before - __shfl_sync(~0u, up_to_here - own, found);
      }
      before += __shfl_sync(~0u, up_to_here, 31);
    }
  }

  __device__ __forceinline__ void enter_segment(const Division& division) {
    if (division.whole_tiles()) {
      tile = 0;
      tile_end = asked.tiles;
    } else if (SPLIT_TILES > 0) {
      const int split = division.split_of(asked);
      tile = at * split;
      tile_end = min(tile + split, asked.tiles);
    } else {
      tile = at;
      tile_end = at + min(asked.tiles - at, unit_end - unit);
    }
  }
};

// A cursor in shared memory: the same in all lanes of a warp.
struct ParkedCursor {
  u32 smem;
  int number;  // among those of this thread's warp

  __device__ __forceinline__ ParkedCursor(u32 shared, int which) : smem(shared), number(which) {}

  __device__ __forceinline__ void put(const Cursor& cursor) const {
    static_assert(sizeof(Cursor) <= CURSOR_BYTES, "a cursor fits");
    const int* words = reinterpret_cast<const int*>(&cursor);
    const u32 at = address();
    __syncwarp();  // nobody reads the one before any more
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int i = 0; i < int(sizeof(Cursor) / 4); ++i)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 4 * i), "r"(words[i]) : "memory");
    }
    __syncwarp();
  }
  __device__ __forceinline__ void take(Cursor& cursor) const {
    int* words = reinterpret_cast<int*>(&cursor);
    const u32 at = address();
#pragma unroll
    for (int i = 0; i < int(sizeof(Cursor) / 4); ++i)
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i]) : "r"(at + 4 * i) : "memory");
  }

 private:
  // Computed where it is needed: registers are for O.
  __device__ __forceinline__ u32 address() const {
    return smem + CURSORS_OFFSET + (opaque(threadIdx.x) / 32 * CURSORS + number) * CURSOR_BYTES;
  }
};

}  // namespace
