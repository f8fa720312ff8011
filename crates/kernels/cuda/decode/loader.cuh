// flash_decode: KV tiles from the cache to a team's ring, row by row: contiguous, packed or in pages.
#pragma once
#include "barrier.cuh"
#include "copy.cuh"
#include "launch.cuh"
#include "work.cuh"

namespace {

// What is filled into shared memory without cp.async, where rows are not 16-byte aligned.
__device__ __forceinline__ void copy_plain(u32 to, const unsigned char* from, int valid_bytes) {
  u32 words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; i += KV_BYTES)
    if (i < valid_bytes) {
      const u32 value = KV_BYTES == 2 ? u32(*reinterpret_cast<const u16*>(from + i)) : u32(from[i]);
      words[i / 4] |= value << (8 * (i % 4));
    }
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void cp_async_4(u32 to, const void* from, int valid_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid_bytes) : "memory");
}

// One of K and V: a head's rows. What the parameters say is read where it is needed: registers are for O.
struct Source {
  const unsigned char* base;  // the sequence's first row, or the first of page 0
  bool aligned;

  __device__ __forceinline__ void enter(const void* tensor, const long long (&stride)[3], const Cursor& at) {
    base = static_cast<const unsigned char*>(tensor) + at.head_kv * stride[1] * KV_BYTES;
    if (!PAGED_CACHE) base += (at.asked.bounds.block * stride[0] + at.asked.bounds.kv_first * stride[2]) * KV_BYTES;
    const long long steps = stride[2] | (PAGED_CACHE ? stride[0] : 0);
    aligned = rows_are_16_byte_aligned(base, steps * KV_BYTES);
  }

  // Rows [0, rows) of `dim` elements from where `row` says; the rest of the tile becomes zero.
  template <typename Tile, typename Row>
  __device__ __forceinline__ void copy(u32 to, int rows, int dim, Row row) const {
    const int thread = opaque(threadIdx.x) % TEAM;
#pragma unroll
    for (int i = 0; i < (WARP_KEYS * Tile::CHUNKS + TEAM - 1) / TEAM; ++i) {
      const int index = i * TEAM + thread;
      const int number = index / Tile::CHUNKS;
      const int chunk = index % Tile::CHUNKS;
      // All lanes take part: rows are asked for from lane to lane.
      const unsigned char* from = base + row(number) * KV_BYTES + chunk * 16;
      if ((WARP_KEYS * Tile::CHUNKS) % TEAM != 0 && number >= WARP_KEYS) continue;
      const int valid = number < rows ? min(max(dim * KV_BYTES - chunk * 16, 0), 16) : 0;
      if (aligned)
        cp_async_16<true>(to + Tile::offset(number, chunk), valid > 0 ? from : base, valid);
      else
        copy_plain(to + Tile::offset(number, chunk), from, valid);
    }
  }
};

// A team's loads: always STAGES - 1 KV tiles ahead, over the ends of Q tiles.
struct Loader {
  const SdpaParams& p;
  u32 ring;
  Division division;
  Cursor at;
  Source k, v;
  int tile;         // the next to be loaded
  int slot;         // where to
  int page, token;  // of this lane's key in the next tile: the page, and the row in it

  __device__ __forceinline__ Loader(const SdpaParams& params, unsigned char* smem, const Division& all, const Cursor& first)
      : p(params), ring(shared_address(smem) + threadIdx.x / TEAM * RING_BYTES), division(all), at(first), slot(0) {
    if (at.valid()) enter();
  }

  __device__ __forceinline__ void fill() {
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) issue();
  }

  // The team's keys of a tile, from this one on.
  static __device__ __forceinline__ int first_key_of(const Cursor& at, int tile) {
    return at.asked.key_first + tile * BLOCK_N + int(threadIdx.x) / TEAM * WARP_KEYS;
  }

  // The next tile into the next slot: always one commit group, empty past the end.
  __device__ __forceinline__ void issue() {
    if (at.valid()) {
      copy(ring + slot * STAGE_BYTES, first_key_of(at, tile));
      if (++tile < at.tile_end) {
        look_up();
      } else {
        at.next(p, division);
        if (at.valid()) enter();
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    cp_async_commit();
  }

 private:
  __device__ __forceinline__ void enter() {
    tile = at.tile;
    k.enter(p.k, p.k_stride, at);
    v.enter(p.v, p.v_stride, at);
    look_up();
  }

  // Where this lane's key of the next tile lies: asked a tile ahead, so that nobody waits for the page table.
  __device__ __forceinline__ void look_up() {
    if (!PAGED_CACHE && !TOKEN_SCALES) return;
    const int key = first_key_of(at, tile) + int(threadIdx.x) % 32;
    const bool exists = key < at.asked.key_end && int(threadIdx.x) % 32 < WARP_KEYS;
    token = at.asked.bounds.kv_first + (exists ? key : 0);
    page = at.asked.bounds.block;
    if (PAGED_CACHE) {
      const int index = token / p.page_size;
      token -= index * p.page_size;
      // Whatever the table holds, nothing outside the cache is read; past a sequence's end not even the table.
      page = exists ? min(max(p.page_table[page * p.page_table_stride + index], 0), p.pages - 1) : 0;
    }
  }

  __device__ __forceinline__ void copy(u32 to, int key) {
    const int rows = at.asked.key_end - key;
    // Where a row of the tile begins, in elements from the base.
    const auto row_of = [&](const long long(&stride)[3]) {
      return [&](int number) {
        if (!PAGED_CACHE) return (key + number) * stride[2];
        const int in_page = __shfl_sync(~0u, token, number % 32);
        return __shfl_sync(~0u, page, number % 32) * stride[0] + in_page * stride[2];
      };
    };
    k.copy<KTile>(to, rows, p.dim_qk, row_of(p.k_stride));
    v.copy<VTile>(to + KTile::BYTES, rows, p.dim_v, row_of(p.v_stride));
    const int lane = threadIdx.x % TEAM;
    if (TOKEN_SCALES && lane < WARP_KEYS) {
      // Scales are contiguous: [block or page, key head, token].
      const int tokens = PAGED_CACHE ? p.page_size : PACKED_KEYS ? p.tokens_kv : p.seq_kv;
      const long long index = ((long long)(PACKED_KEYS ? 0 : page) * p.heads_kv + at.head_kv) * tokens + token;
      const int valid = lane < rows ? 4 : 0;
      cp_async_4(to + SCALES_OFFSET + 4 * lane, p.k_scale + (valid ? index : 0), valid);
      cp_async_4(to + SCALES_OFFSET + 4 * (WARP_KEYS + lane), p.v_scale + (valid ? index : 0), valid);
    }
  }
};

}  // namespace
