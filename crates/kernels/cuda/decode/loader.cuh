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

  // The first `rows` rows of `dim` elements from where `place` says; the rest of the tile becomes zero.
  template <typename Tile, typename Place>
  __device__ __forceinline__ void copy(u32 to, int rows, int dim, const Place& place) const {
    if (rows >= WARP_KEYS && aligned && dim * KV_BYTES == Tile::CHUNKS * 16)
      copy_whole<Tile>(to, place);
    else
      copy_any<Tile>(to, rows, dim, place);
  }

 private:
  // Every chunk is there: a copy is an address and the instruction.
  template <typename Tile, typename Place>
  __device__ __forceinline__ void copy_whole(u32 to, const Place& place) const {
    const int thread = opaque(threadIdx.x) % TEAM;
    if constexpr (TEAM % Tile::CHUNKS == 0) {
      // A thread's chunks lie below one another.
      constexpr int STEP = TEAM / Tile::CHUNKS;
      const int number = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
      const u32 lane = to + Tile::offset(number, chunk);
      const unsigned char* column = base + chunk * 16;
      const unsigned char* from = column + place(number);
#pragma unroll
      for (int i = 0; i < (WARP_KEYS + STEP - 1) / STEP; ++i) {
        if (STEP <= WARP_KEYS || number < WARP_KEYS) cp_async_16_whole(Tile::below(lane, i * STEP), from);
        const bool below = Place::BELOW || Place::SIXTEENS && 16 % STEP == 0 && (i + 1) * STEP % 16 != 0;
        from = below ? from + place.step(STEP) : column + place(number + (i + 1) * STEP);
      }
    } else {
#pragma unroll
      for (int i = 0; i < (WARP_KEYS * Tile::CHUNKS + TEAM - 1) / TEAM; ++i) {
        const int index = i * TEAM + thread;
        const int number = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
        const unsigned char* from = base + place(number) + chunk * 16;  // all lanes take part
        if ((WARP_KEYS * Tile::CHUNKS) % TEAM == 0 || number < WARP_KEYS) cp_async_16_whole(to + Tile::offset(number, chunk), from);
      }
    }
  }

  // The last keys of a sequence, padded head dimensions, rows that are not aligned.
  template <typename Tile, typename Place>
  __device__ __forceinline__ void copy_any(u32 to, int rows, int dim, const Place& place) const {
    const int thread = opaque(threadIdx.x) % TEAM;
#pragma unroll 1
    for (int i = 0; i < (WARP_KEYS * Tile::CHUNKS + TEAM - 1) / TEAM; ++i) {
      const int index = i * TEAM + thread;
      const int number = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
      const unsigned char* from = base + place(number) + chunk * 16;  // all lanes take part
      if ((WARP_KEYS * Tile::CHUNKS) % TEAM != 0 && number >= WARP_KEYS) continue;
      const int valid = number < rows ? min(max(dim * KV_BYTES - chunk * 16, 0), 16) : 0;
      if (aligned)
        cp_async_16<true>(to + Tile::offset(number, chunk), valid > 0 ? from : base, valid);
      else
        copy_plain(to + Tile::offset(number, chunk), from, valid);
    }
  }
};

// Where the rows of a tile lie, in bytes from the base: one below the other from `key` on, or wherever their lanes know their pages to
// be. SIXTEENS: pages hold multiples of 16 tokens, and 16 keys of a tile are always below one another.
struct RowsBelow {
  static constexpr bool BELOW = true, SIXTEENS = false;
  int key;
  const long long (&stride)[3];
  __device__ __forceinline__ long long step(int rows) const { return rows * stride[2] * KV_BYTES; }
  __device__ __forceinline__ long long operator()(int number) const { return (key + number) * stride[2] * KV_BYTES; }
};
template <bool SIXTEENS_>
struct RowsInPages {
  static constexpr bool BELOW = false, SIXTEENS = SIXTEENS_;
  const long long (&stride)[3];
  long long own;  // this lane's key

  __device__ __forceinline__ RowsInPages(int page, int token, const long long (&strides)[3])
      : stride(strides), own((page * strides[0] + token * strides[2]) * KV_BYTES) {}
  __device__ __forceinline__ long long step(int rows) const { return rows * stride[2] * KV_BYTES; }
  __device__ __forceinline__ long long operator()(int number) const { return __shfl_sync(~0u, own, number % 32); }
};

// A team's loads: always STAGES - 1 KV tiles ahead, over the ends of Q tiles.
struct Loader {
  const SdpaParams& p;
  u32 ring;
  Division division;
  ParkedCursor parked;
  bool valid;  // the cursor is
  Source k, v;
  int key, keys_left;   // the team's first key of the next tile, and how many there are from it on
  int tiles_left;       // of the segment
  int head_kv, block, kv_first;
  int slot;             // where the next tile goes
  int page, token;      // of this lane's key in the next tile: what the table says, or the block, and the row in it

  __device__ __forceinline__ Loader(const SdpaParams& params, unsigned char* smem, const Division& all, const Cursor& first)
      : p(params), ring(shared_address(smem) + threadIdx.x / TEAM * RING_BYTES), division(all), parked(shared_address(smem), 0), slot(0) {
    enter(first);
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) issue();
  }

  // The team's keys of a tile, from this one on.
  static __device__ __forceinline__ int first_key_of(const Cursor& at, int tile) {
    return at.asked.key_first + tile * BLOCK_N + int(threadIdx.x) / TEAM * WARP_KEYS;
  }

  // The next tile into the next slot: always one commit group, empty past the end.
  __device__ __forceinline__ void issue() {
    if (valid) {
      copy(ring + slot * STAGE_BYTES);
      if (--tiles_left > 0) {
        key += BLOCK_N;
        keys_left -= BLOCK_N;
        look_up();
      } else if (CLUSTERED) {
        valid = false;  // a cluster has one Q tile
      } else {
        Cursor at;
        parked.take(at);
        at.next(p, division);
        enter(at);
      }
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    cp_async_commit();
  }

 private:
  __device__ __forceinline__ void enter(const Cursor& at) {
    valid = at.valid() && (!CLUSTERED || at.tile < at.tile_end);
    if (!valid) return;
    if (!CLUSTERED) parked.put(at);
    key = first_key_of(at, at.tile);
    keys_left = at.asked.key_end - key;
    tiles_left = at.tile_end - at.tile;
    head_kv = at.head_kv;
    block = at.asked.bounds.block;
    kv_first = at.asked.bounds.kv_first;
    k.enter(p.k, p.k_stride, at);
    v.enter(p.v, p.v_stride, at);
    look_up();
  }

  // Where this lane's key of the next tile lies: asked a tile ahead, so that nobody waits for the page table.
  __device__ __forceinline__ void look_up() {
    if (!PAGED_CACHE && !TOKEN_SCALES) return;
    const int lane = threadIdx.x % 32;
    const bool exists = lane < keys_left && lane < WARP_KEYS;
    token = kv_first + (exists ? key + lane : 0);
    page = block;
    if (PAGED_CACHE) {
      const int index = pages_of(token);
      token -= index * p.page_size;
      // Past a sequence's end not even the table is read.
      const int* entry = p.page_table + page * p.page_table_stride + index;
      page = 0;
      if (exists) page = *entry;
    }
  }
  // Whatever the table holds, nothing outside the cache is read. Looked at only now: whoever looked when it asked would wait for the answer.
  __device__ __forceinline__ int page_inside() const { return PAGED_CACHE ? min(max(page, 0), p.pages - 1) : page; }

  // Whole pages of so many tokens; mostly a page holds a power of two.
  __device__ __forceinline__ int pages_of(int tokens) const {
    const u32 size = p.page_size;
    return (size & (size - 1)) == 0 ? tokens >> (31 - __clz(size)) : tokens / p.page_size;
  }

  template <bool SIXTEENS>
  __device__ __forceinline__ void copy_from_pages(u32 to, int rows) {
    k.copy<KTile>(to, rows, p.dim_qk, RowsInPages<SIXTEENS>(page_inside(), token, p.k_stride));
    v.copy<VTile>(to + KTile::BYTES, rows, p.dim_v, RowsInPages<SIXTEENS>(page_inside(), token, p.v_stride));
  }

  __device__ __forceinline__ void copy(u32 to) {
    const int rows = keys_left;
    if constexpr (!PAGED_CACHE) {
      k.copy<KTile>(to, rows, p.dim_qk, RowsBelow{key, p.k_stride});
      v.copy<VTile>(to + KTile::BYTES, rows, p.dim_v, RowsBelow{key, p.v_stride});
    } else if ((p.page_size | __shfl_sync(~0u, token, 0)) % 16 == 0) {
      copy_from_pages<true>(to, rows);
    } else {
      copy_from_pages<false>(to, rows);
    }
    const int lane = threadIdx.x % TEAM;
    if (TOKEN_SCALES && lane < WARP_KEYS) {
      // Scales are contiguous: [block or page, key head, token].
      const int tokens = PAGED_CACHE ? p.page_size : PACKED_KEYS ? p.tokens_kv : p.seq_kv;
      const long long index = ((long long)(PACKED_KEYS ? 0 : page_inside()) * p.heads_kv + head_kv) * tokens + token;
      const int valid = lane < rows ? 4 : 0;
      cp_async_4(to + SCALES_OFFSET + 4 * lane, p.k_scale + (valid ? index : 0), valid);
      cp_async_4(to + SCALES_OFFSET + 4 * (WARP_KEYS + lane), p.v_scale + (valid ? index : 0), valid);
    }
  }
};

}  // namespace
