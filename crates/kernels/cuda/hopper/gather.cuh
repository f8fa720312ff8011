// K and V that TMA alone cannot fetch, for which the producer is a warp of 32 lanes instead of a thread. Of a cache in pages smaller than
// a tile, TMA fetches boxes that lie in one page each, which the lanes look up; where boxes would be too small or begin inside a page's
// box, rows are copied by cp.async, with zeros behind the last key. Of a tile in which a sequence ends that has a length of its own, TMA fetches what
// lies behind it too: keys there are masked, but values, which a weight of 0 does not hide if they are NaN, are overwritten with zeros.
#pragma once
#include "copy.cuh"
#include "layout.cuh"

namespace {

// Whether there are such tiles at all.
constexpr bool PRODUCER_IS_WARP = PACKED_KEYS || USED_LENGTHS || PAGED_CACHE;

__device__ __forceinline__ bool is_leader() { return !PRODUCER_IS_WARP || threadIdx.x % 32 == 0; }

// Whatever the table holds, nothing outside the cache is read.
__device__ __forceinline__ int page_of(const SdpaParams& p, const QTile& t, int index) {
  return min(max(p.page_table[block_of(t, t.batch) * p.page_table_stride + index], 0), p.pages - 1);
}

// Whether a tile comes from several pages in boxes of BOX_ROWS keys, BOXES in a tile and PAGE_BOXES in a page.
constexpr bool BOXED = PAGED_CACHE && BOX_ROWS < BLOCK_N;
constexpr int BOXES = BLOCK_N / BOX_ROWS;
static_assert(BLOCK_N % BOX_ROWS == 0 && BOX_ROWS % 8 == 0 && BOXES <= 8, "whole swizzle patterns, few pages");

// A tile is TMA's where it lies in one piece, or in whole boxes.
__device__ __forceinline__ bool needs_gather(const SdpaParams& p, const QTile& t) {
  if (BOXED) return first_key(t) % BOX_ROWS != 0;
  return PAGED_CACHE && (p.page_size % BLOCK_N != 0 || first_key(t) % BLOCK_N != 0);
}

// The coordinates of such a tile in the tensor map.
struct TileAt {
  int row, batch;
};
__device__ __forceinline__ TileAt place_of_tile(const SdpaParams& p, const QTile& t, int n) {
  const int key = first_key(t) + n * BLOCK_N;
  if (PAGED_CACHE) return {key % p.page_size, page_of(p, t, key / p.page_size)};
  return {key, PACKED_KEYS ? 0 : block_of(t, t.batch)};
}

__device__ __forceinline__ int first_box(const QTile& t, int n) { return (first_key(t) + n * BLOCK_N) / BOX_ROWS; }

// The page of a lane's box of a tile. Entries of the table behind the last key's are nobody's: boxes there come from its page.
__device__ __forceinline__ int page_of_lane(const SdpaParams& p, const QTile& t, int n) {
  const int last_box = (first_key(t) + keys_of(p, t) - 1) / BOX_ROWS;
  return page_of(p, t, min(first_box(t, n) + static_cast<int>(threadIdx.x % 32), last_box) / PAGE_BOXES);
}

// What has been copied and not yet told the consumers.
struct Gathered {
  u32 full;
  bool pending = false;

  // Copies tile n to `smem`; its barrier is told when the next one has been copied or somebody may wait for it.
  template <int PANELS>
  __device__ __forceinline__ void copy(const SdpaParams& p, const void* tensor, const long long (&stride)[3], int dim, const QTile& t,
                                       int n, u32 smem, u32 barrier) {
    constexpr int CHUNKS = 8 * PANELS;
    const element* base = head_of(static_cast<const element*>(tensor), stride, PAGED_CACHE ? 0 : block_of(t, t.batch), t.head_kv);
    const int keys = keys_of(p, t) - n * BLOCK_N;
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < BLOCK_N * CHUNKS; index += 32) {
      const int row = index / CHUNKS, chunk = index % CHUNKS;
      const int valid = row < keys ? min(max(dim - chunk * 8, 0), 8) : 0;
      const element* from = base;
      if (valid > 0) from += row_offset(p, stride, t, n * BLOCK_N + row) + chunk * 8;
      cp_async_16(smem + chunk / 8 * KV_PANEL_BYTES + panel_offset(row, chunk % 8), from, valid * 2);
    }
    cp_async_commit();
    if (pending) publish<1>();
    full = barrier;
    pending = true;
  }

  // The copies are there, for the tensor cores too: they read by another way than these writes went.
  template <int STILL_COPYING = 0>
  __device__ __forceinline__ void publish() {
    if (!pending) return;
    cp_async_wait<STILL_COPYING>();
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    pending = false;
  }

 private:
  static __device__ __forceinline__ long long row_offset(const SdpaParams& p, const long long (&stride)[3], const QTile& t, int key) {
    key += first_key(t);
    if (!PAGED_CACHE) return key * stride[2];
    const int index = key / p.page_size;
    return page_of(p, t, index) * stride[0] + (key - index * p.page_size) * stride[2];
  }
};

// A V tile in which a sequence ends, on its way.
struct Tail {
  u32 smem, full;
  int keys;  // of the sequence in this tile
  bool pending = false;
  u32 uses = 0;

  __device__ __forceinline__ void begin(int keys_here, u32 tile, u32 barrier) {
    keys = keys_here, smem = tile, full = barrier;
    pending = true;
  }

  // TMA has written the tile; its last rows become zeros, and the consumers may have it.
  __device__ __forceinline__ void publish(u32 there) {
    if (!pending) return;
    mbarrier_wait(there, uses++ & 1);
    const u32 end = smem + KV_PANEL_BYTES;
#pragma unroll 1
    for (u32 at = smem + keys * 128 + threadIdx.x % 32 * 16; at < end; at += 512)
#pragma unroll
      for (int panel = 0; panel < V_PANELS; ++panel) store_zeros_16(at + panel * KV_PANEL_BYTES);
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    pending = false;
  }
};

}  // namespace
