// flash_decode: KV tiles from the cache to a team's ring, row by row: contiguous, packed or in pages.
#pragma once
#include "barrier.cuh"
#include "copy.cuh"
#include "launch.cuh"
#include "tma.cuh"
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
__device__ __forceinline__ void cp_async_4_whole(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// All 16 bytes of a row that one Q tile reads, and nobody after it: they leave L2 first.
__device__ __forceinline__ void cp_async_16_once(u32 to, const void* from) {
#if __CUDA_ARCH__ >= 900
  if (WARPS_M == 1) {  // of more rows there may be several Q tiles
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(L2_EVICT_FIRST)
                 : "memory");
    return;
  }
#endif
  cp_async_16_whole(to, from);
}

// One of K and V: a head's rows. What the parameters say is read where it is needed: registers are for O.
struct Source {
  const unsigned char* base;  // the first row of the sequence's block, or of page 0
  bool aligned;

  __device__ __forceinline__ void enter(const void* tensor, const long long (&stride)[3], const Cursor& at) {
    base = static_cast<const unsigned char*>(tensor) + at.head_kv * stride[1] * KV_BYTES;
    if (!PAGED_CACHE) base += at.asked.bounds.block * stride[0] * KV_BYTES;
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
        if (STEP <= WARP_KEYS || number < WARP_KEYS) cp_async_16_once(Tile::below(lane, i * STEP), from);
        const bool below = Place::BELOW || Place::SIXTEENS && 16 % STEP == 0 && (i + 1) * STEP % 16 != 0;
        from = below ? from + place.step(STEP) : column + place(number + (i + 1) * STEP);
      }
    } else {
#pragma unroll
      for (int i = 0; i < (WARP_KEYS * Tile::CHUNKS + TEAM - 1) / TEAM; ++i) {
        const int index = i * TEAM + thread;
        const int number = index / Tile::CHUNKS, chunk = index % Tile::CHUNKS;
        const unsigned char* from = base + place(number) + chunk * 16;  // all lanes take part
        if ((WARP_KEYS * Tile::CHUNKS) % TEAM == 0 || number < WARP_KEYS) cp_async_16_once(to + Tile::offset(number, chunk), from);
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

// Where the rows of a tile lie, in bytes from the base: one below the other from `token` on, or wherever their lanes know their pages to
// be. SIXTEENS: pages hold multiples of 16 tokens, and 16 keys of a tile are always below one another.
struct RowsBelow {
  static constexpr bool BELOW = true, SIXTEENS = false;
  int token;
  const long long (&stride)[3];
  __device__ __forceinline__ long long step(int rows) const { return rows * stride[2] * KV_BYTES; }
  __device__ __forceinline__ long long operator()(int number) const { return (token + number) * stride[2] * KV_BYTES; }
};
// Pages of multiples of 16 tokens: 16 keys of a tile are below one another, and all lanes know where.
struct RowsInSixteens {
  static constexpr bool BELOW = false, SIXTEENS = true;
  static constexpr int COUNT = WARP_KEYS / 16;
  const long long (&stride)[3];
  long long first[COUNT];

  __device__ __forceinline__ RowsInSixteens(const int (&pages)[COUNT], const int (&tokens)[COUNT], const long long (&strides)[3])
      : stride(strides) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) first[i] = (pages[i] * strides[0] + tokens[i] * strides[2]) * KV_BYTES;
  }
  __device__ __forceinline__ long long step(int rows) const { return rows * stride[2] * KV_BYTES; }
  __device__ __forceinline__ long long operator()(int number) const {
    return (number < 16 ? first[0] : first[COUNT - 1]) + step(number % 16);
  }
};
// Others: a lane knows where its key is.
struct RowsInPages {
  static constexpr bool BELOW = false, SIXTEENS = false;
  const long long (&stride)[3];
  long long own;

  __device__ __forceinline__ RowsInPages(int page, int token, const long long (&strides)[3])
      : stride(strides), own((page * strides[0] + token * strides[2]) * KV_BYTES) {}
  __device__ __forceinline__ long long step(int rows) const { return rows * stride[2] * KV_BYTES; }
  __device__ __forceinline__ long long operator()(int number) const { return __shfl_sync(~0u, own, number % 32); }
};

// A team's way through its KV tiles, over the ends of Q tiles.
struct Walk {
  ParkedCursor parked;
  int tiles_left;        // of the segment; 0: there is no further one
  int token, keys_left;  // the team's first key of the tile among its sequence's tokens, and how many there are from it on
  int head_kv, block;

  __device__ __forceinline__ Walk(unsigned char* smem, int number) : parked(shared_address(smem), number) {}

  // The team's keys of a tile, from this one on.
  static __device__ __forceinline__ int first_key_of(const Cursor& at, int tile) {
    return at.asked.key_first + tile * BLOCK_N + int(threadIdx.x) / TEAM * WARP_KEYS;
  }

  __device__ __forceinline__ void enter(const Cursor& at) {
    tiles_left = at.valid() ? at.tile_end - at.tile : 0;
    if (tiles_left == 0) return;
    if (!CLUSTERED) parked.put(at);
    const int key = first_key_of(at, at.tile);
    token = at.asked.bounds.kv_first + key;
    keys_left = at.asked.key_end - key;
    head_kv = at.head_kv;
    block = at.asked.bounds.block;
  }

  // To the next tile; whoever keeps something of a segment is told of a new one.
  template <typename Entered>
  __device__ __forceinline__ void next(const SdpaParams& p, const Division& division, Entered entered) {
    if (--tiles_left > 0) {
      token += BLOCK_N;
      keys_left -= BLOCK_N;
    } else if (!CLUSTERED) {  // a cluster has one Q tile
      Cursor at;
      parked.take(at);
      at.next(p, division);
      enter(at);
      entered(at);
    }
  }

  // Whether this lane has a key of the tile, and where that is among the sequence's tokens.
  __device__ __forceinline__ bool exists() const { return int(threadIdx.x) % 32 < min(keys_left, WARP_KEYS); }
  __device__ __forceinline__ int own_token() const { return exists() ? token + int(threadIdx.x) % 32 : token; }
};

// Whole pages of so many tokens; mostly a page holds a power of two.
__device__ __forceinline__ int pages_of(const SdpaParams& p, int tokens) {
  const u32 size = p.page_size;
  return (size & (size - 1)) == 0 ? tokens >> (31 - __clz(size)) : tokens / p.page_size;
}

// The page of this lane's key in each tile of the ring. A tile's are asked for with the copies of the tile STAGES - 1 before it, and have come when
// those have: whoever asked later would wait behind everything that is in flight.
struct Pages {
  u32 smem;
  Walk ahead;

  __device__ __forceinline__ Pages(unsigned char* shared) : smem(shared_address(shared)), ahead(shared, 2) {}

  // Part of the caller's commit group.
  __device__ __forceinline__ void ask(const SdpaParams& p, const Division& division, int slot) {
    if (ahead.tiles_left == 0) return;
    const u32 to = entry_of(slot, threadIdx.x % 32);
    if (ahead.exists())
      cp_async_4_whole(to, p.page_table + ahead.block * p.page_table_stride + pages_of(p, ahead.own_token()));
    else if (threadIdx.x % 32 < WARP_KEYS)  // past a sequence's end not even the table is read
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(0) : "memory");
    ahead.next(p, division, [](const Cursor&) {});
  }

  // The page of a key of the warp. Whatever the table holds, nothing outside the cache is read.
  __device__ __forceinline__ int page(const SdpaParams& p, int slot, int number) const {
    int entry;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(entry) : "r"(entry_of(slot, number)) : "memory");
    return min(max(entry, 0), p.pages - 1);
  }

 private:
  __device__ __forceinline__ u32 entry_of(int slot, int number) const {
    return smem + PAGES_OFFSET + opaque(threadIdx.x) / 32 * PAGES_BYTES + slot * (WARP_KEYS * 4) + number * 4;
  }
};

// A team's loads: always STAGES - 1 KV tiles ahead.
struct Loader {
  const SdpaParams& p;
  u32 ring;
  Division division;
  Walk tiles;
  Pages pages;
  Source k, v;
  int slot;  // where the next tile goes

  __device__ __forceinline__ Loader(const SdpaParams& params, unsigned char* smem, const Division& all, const Cursor& first)
      : p(params), ring(shared_address(smem) + threadIdx.x / TEAM * RING_BYTES), division(all), tiles(smem, 0), pages(smem), slot(0) {
    if (PAGED_CACHE) {
      // The pages of the first tiles, for which fill() waits.
      pages.ahead.enter(first);
#pragma unroll 1
      for (int stage = 0; stage < STAGES - 1; ++stage) pages.ask(p, division, stage);
      cp_async_commit();
    }
    tiles.enter(first);
    enter(first);
  }

  __device__ __forceinline__ void fill() {
    if (PAGED_CACHE) cp_async_wait<0>();
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      if (PAGED_CACHE) __syncwarp();  // all lanes see the pages, and have read those of the tile before
      issue();
    }
  }

  // The next tile into the next slot: always one commit group, empty past the end.
  __device__ __forceinline__ void issue() {
    if (PAGED_CACHE) pages.ask(p, division, slot == 0 ? STAGES - 1 : slot - 1);
    if (tiles.tiles_left > 0) {
      copy(ring + slot * STAGE_BYTES);
      tiles.next(p, division, [&](const Cursor& at) { enter(at); });
    }
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    cp_async_commit();
  }

 private:
  __device__ __forceinline__ void enter(const Cursor& at) {
    if (tiles.tiles_left == 0) return;
    k.enter(p.k, p.k_stride, at);
    v.enter(p.v, p.v_stride, at);
  }

  template <typename Place>
  __device__ __forceinline__ void copy_both(u32 to, const Place& k_rows, const Place& v_rows) const {
    k.copy<KTile>(to, tiles.keys_left, p.dim_qk, k_rows);
    v.copy<VTile>(to + KTile::BYTES, tiles.keys_left, p.dim_v, v_rows);
  }

  __device__ __forceinline__ void copy(u32 to) {
    // Where this lane's key lies.
    int page = tiles.block, token = tiles.own_token();
    if constexpr (!PAGED_CACHE) {
      copy_both(to, RowsBelow{tiles.token, p.k_stride}, RowsBelow{tiles.token, p.v_stride});
    } else {
      const bool sixteens = (p.page_size | tiles.token) % 16 == 0;
      if (!sixteens || TOKEN_SCALES) {
        page = pages.page(p, slot, int(threadIdx.x) % WARP_KEYS);
        token -= pages_of(p, token) * p.page_size;
      }
      if (sixteens) {
        int numbers[WARP_KEYS / 16], tokens[WARP_KEYS / 16];
#pragma unroll
        for (int i = 0; i < WARP_KEYS / 16; ++i) {
          const int first = tiles.token + 16 * i;
          numbers[i] = pages.page(p, slot, 16 * i);
          tokens[i] = first - pages_of(p, first) * p.page_size;
        }
        copy_both(to, RowsInSixteens(numbers, tokens, p.k_stride), RowsInSixteens(numbers, tokens, p.v_stride));
      } else {
        copy_both(to, RowsInPages(page, token, p.k_stride), RowsInPages(page, token, p.v_stride));
      }
    }
    const int lane = threadIdx.x % TEAM;
    if (TOKEN_SCALES && lane < WARP_KEYS) {
      // Scales are contiguous: [block or page, key head, token].
      const int tokens = PAGED_CACHE ? p.page_size : PACKED_KEYS ? p.tokens_kv : p.seq_kv;
      const long long index = ((long long)(PACKED_KEYS ? 0 : page) * p.heads_kv + tiles.head_kv) * tokens + token;
      const int valid = lane < tiles.keys_left ? 4 : 0;
      cp_async_4(to + SCALES_OFFSET + 4 * lane, p.k_scale + (valid ? index : 0), valid);
      cp_async_4(to + SCALES_OFFSET + 4 * (WARP_KEYS + lane), p.v_scale + (valid ? index : 0), valid);
    }
  }
};

}  // namespace
