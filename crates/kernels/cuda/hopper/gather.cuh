// K and V that TMA alone cannot fetch, for which the producer is a warp of 32 lanes instead of a thread. Of a cache in pages smaller than
// a tile, TMA fetches boxes that lie in one page each, which the lanes look up. Where pages have no such boxes, two warps (FEEDERS) copy the
// rows by cp.async, with zeros behind the last key; where a sequence begins inside a box, one does. Of a tile in which a sequence ends that has a length of its own, TMA fetches what
// lies behind it too: keys there are masked, but values, which a weight of 0 does not hide if they are NaN, are overwritten with zeros.
#pragma once
#include "copy.cuh"
#include "layout.cuh"

namespace {

// Whether there are such tiles at all.
constexpr bool PRODUCER_IS_WARP = PACKED_KEYS || USED_LENGTHS || PAGED_CACHE;

// For all lanes of the producer. What is issued under anything but this, or kept longer than the next block, ptxas issues in a loop over lanes.
__device__ __forceinline__ bool is_leader() { return !PRODUCER_IS_WARP || elect_lane(); }

__device__ __forceinline__ int entry_of(const SdpaParams& p, const QTile& t, int index) {
  return p.page_table[block_of(t, t.batch) * p.page_table_stride + index];
}
// Whatever the table holds, nothing outside the cache is read.
__device__ __forceinline__ int page_inside(const SdpaParams& p, int entry) { return min(max(entry, 0), p.pages - 1); }

// Whether a tile comes from several pages in boxes of BOX_ROWS keys, BOXES in a tile and PAGE_BOXES in a page.
constexpr bool BOXED = PAGED_CACHE && BOX_ROWS < BLOCK_N;
constexpr int BOXES = BLOCK_N / BOX_ROWS;
static_assert(BLOCK_N % BOX_ROWS == 0 && BOX_ROWS % 8 == 0 && BOXES <= 8, "whole swizzle patterns, few pages");
static_assert(!GATHERED_PAGES || !BOXED, "pages are in boxes, or have none");

// A tile is TMA's where it lies in one piece, or in whole boxes.
__device__ __forceinline__ bool needs_gather(const QTile& t) {
  return PAGED_CACHE && (GATHERED_PAGES || first_key(t) % BOX_ROWS != 0);
}

// The coordinates of such a tile in the tensor map.
struct TileAt {
  int row, batch;
};
__device__ __forceinline__ TileAt place_of_tile(const SdpaParams& p, const QTile& t, int n) {
  const int key = first_key(t) + n * BLOCK_N;
  if (PAGED_CACHE) return {key % p.page_size, page_inside(p, entry_of(p, t, key / p.page_size))};
  return {key, PACKED_KEYS ? 0 : block_of(t, t.batch)};
}

__device__ __forceinline__ int first_box(const QTile& t, int n) { return (first_key(t) + n * BLOCK_N) / BOX_ROWS; }

// The table's entry for a lane's box of a tile. Entries behind the last key's are nobody's: boxes there come from its page.
__device__ __forceinline__ int entry_of_box(const SdpaParams& p, const QTile& t, int n) {
  const int last_box = (first_key(t) + keys_of(p, t) - 1) / BOX_ROWS;
  return entry_of(p, t, min(first_box(t, n) + static_cast<int>(threadIdx.x % 32), last_box) / PAGE_BOXES);
}

// Rows of tiles that a warp copies, 32 at a time.
struct Gathered {
  static constexpr bool IN_BLOCKS = GATHERED_PAGES && !MODIFIED;
  u32 full;
  bool pending = false;  // copied and not yet told the consumers

  // The key of a lane's row, the first of the warp's or one of the next 32; behind the sequence's end its last one.
  static __device__ __forceinline__ int key_of(const SdpaParams& p, const QTile& t, int n, int row) {
    return first_key(t) + min(n * BLOCK_N + row + static_cast<int>(threadIdx.x % 32), keys_of(p, t) - 1);
  }
  static __device__ __forceinline__ int first_entry(const SdpaParams& p, const QTile& t, int n, int feeder) {
    return entry_of(p, t, key_of(p, t, n, 32 * feeder) / p.page_size);
  }

  // Copies this warp's rows of tile n to `smem`, the first of them from where `entry` says; the barrier is told when the next tile has
  // been copied or somebody may wait for it.
  template <int PANELS>
  __device__ __forceinline__ void copy(const SdpaParams& p, const void* tensor, const long long (&stride)[3], int dim, const QTile& t,
                                       int n, int feeder, int entry, u32 smem, u32 barrier) {
    const element* base = head_of(static_cast<const element*>(tensor), stride, 0, t.head_kv);
    if (IN_BLOCKS)
      copy_blocks<PANELS>(p, base, stride, dim, t, n, feeder, entry, smem);
    else
      copy_by_lanes<PANELS>(p, base, stride, dim, t, n, feeder, smem);
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
    if (is_leader()) mbarrier_arrive(full);
    pending = false;
  }

 private:
  template <int PANELS>
  static __device__ __forceinline__ void copy_blocks(const SdpaParams& p, const element* base, const long long (&stride)[3], int dim,
                                                     const QTile& t, int n, int feeder, int entry, u32 smem) {
#pragma unroll 1
    for (int row = 32 * feeder; row < BLOCK_N; row += 32 * FEEDERS) {
      const int key = key_of(p, t, n, row), page = page_inside(p, entry);
      if (row + 32 * FEEDERS < BLOCK_N) entry = entry_of(p, t, key_of(p, t, n, row + 32 * FEEDERS) / p.page_size);  // comes meanwhile
      const element* own = base + page * stride[0] + key % p.page_size * stride[2];
      const int keys = keys_of(p, t) - n * BLOCK_N - row;
      if (BLOCK_N % 32 == 0 && keys >= 32 && dim == PANEL * PANELS)
        copy_rows<PANELS>(own, row, smem, [](u32 to, const element* from, int, int) { cp_async_16_whole(to, from); });
      else
        copy_rows<PANELS>(own, row, smem, [&](u32 to, const element* from, int number, int chunk) {
          const int valid = number < keys ? min(max(dim - chunk * 8, 0), 8) : 0;
          if (row + number < BLOCK_N) cp_async_16(to, valid > 0 ? from : base, valid * 2);
        });
    }
  }

  // A row a lane, behind the last key none of the last one: slower, and with few registers.
  template <int PANELS>
  static __device__ __forceinline__ void copy_by_lanes(const SdpaParams& p, const element* base, const long long (&stride)[3], int dim,
                                                       const QTile& t, int n, int feeder, u32 smem) {
    const int lane = opaque(threadIdx.x) % 32;
#pragma unroll 1
    for (int row = 32 * feeder + lane; row < BLOCK_N; row += 32 * FEEDERS) {
      const int key = key_of(p, t, n, row - lane), index = key / p.page_size;
      const element* own = base + page_inside(p, entry_of(p, t, index)) * stride[0] + (key - index * p.page_size) * stride[2];
      const int elements = n * BLOCK_N + row < keys_of(p, t) ? dim : 0;
#pragma unroll 1
      for (int chunk = 0; chunk < 8 * PANELS; ++chunk) {
        const int valid = min(max(elements - chunk * 8, 0), 8);
        cp_async_16(smem + chunk / 8 * KV_PANEL_BYTES + panel_offset(row, chunk % 8), valid > 0 ? own + chunk * 8 : own, valid * 2);
      }
    }
  }

  // 32 rows from `first` on, whose lanes know where they are: a chunk a lane, lanes side by side.
  template <int PANELS, typename Copy>
  static __device__ __forceinline__ void copy_rows(const element* own, int first, u32 smem, const Copy& copy_chunk) {
    constexpr int CHUNKS = 8 * PANELS;
    const int lane = opaque(threadIdx.x) % 32;
#pragma unroll 4
    for (int turn = 0; turn < CHUNKS; ++turn) {
      const int index = turn * 32 + lane, number = index / CHUNKS, chunk = index % CHUNKS;
      const element* from = reinterpret_cast<const element*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), number)) + chunk * 8;
      copy_chunk(smem + chunk / 8 * KV_PANEL_BYTES + panel_offset(first + number, chunk % 8), from, number, chunk);
    }
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
    if (is_leader()) mbarrier_arrive(full);
    pending = false;
  }
};

}  // namespace
