// ampere_fwd, ampere_f32: where rows of Q, K and V lie, and how the rows of a cache in pages come to shared memory.
#pragma once
#include "copy.cuh"
#include "tiles.cuh"

namespace {

// Rows of one head: where the first starts, and whether 16-byte copies may be used.
struct Source {
  const Scalar* base;
  long long stride;
  int dim;
  bool aligned;
};

// The same of a cache in pages: `base` is the head's first row in page 0.
struct PagedSource {
  const Scalar* base;
  long long stride, page_stride;
  int dim;
  bool aligned;
  const int* table;  // the sequence's row
  int page_size, last_page;
  int first;  // keys of the sequence's pages before its first one

  __device__ __forceinline__ const Scalar* row(int key) const {
    key += first;
    const int index = key / page_size;
    // Whatever the table holds, nothing outside the cache is read.
    const int page = min(max(table[index], 0), last_page);
    return base + page * page_stride + (key - index * page_size) * stride;
  }
};

template <bool PAGES>
struct CacheSourceOf {
  using type = Source;
};
template <>
struct CacheSourceOf<true> {
  using type = PagedSource;
};
using CacheSource = CacheSourceOf<(PAGED_CACHE > 0)>::type;

__device__ __forceinline__ Source rows_of(const void* tensor, const long long (&stride)[3], int batch, int head, int first, int dim) {
  const Scalar* base = head_of(static_cast<const Scalar*>(tensor), stride, batch, head);
  if (OWN_LENGTHS) base += first * stride[2];
  return {base, stride[2], dim, rows_are_16_byte_aligned(base, stride[2])};
}

template <typename Cache>
__device__ __forceinline__ Cache cache_of(const SdpaParams& p, const void* tensor, const long long (&stride)[3], const Work& work, int dim) {
  const int block = OWN_LENGTHS ? work.sequence.block : work.batch;
  const int first = first_key(work.bounds(p));
  if constexpr (PAGED_CACHE) {
    const Scalar* base = head_of(static_cast<const Scalar*>(tensor), stride, 0, work.head_kv);
    const bool aligned = rows_are_16_byte_aligned(base, stride[2]) && stride[0] * sizeof(Scalar) % 16 == 0;
    return {base, stride[2], stride[0], dim, aligned, p.page_table + block * p.page_table_stride, p.page_size, p.pages - 1, first};
  } else {
    return rows_of(tensor, stride, block, work.head_kv, first, dim);
  }
}

// One 32-bit word of a row: an f32, or two 16-bit elements, of which the second may lie past `dim`.
__device__ __forceinline__ u32 word_of_row(const Scalar* row, int column, int dim) {
  if constexpr (sizeof(Scalar) == 4) {
    return reinterpret_cast<const u32*>(row)[column];
  } else {
    const u16* from = reinterpret_cast<const u16*>(row) + column;
    u32 pair = from[0];
    if (column + 1 < dim) pair |= u32(from[1]) << 16;
    return pair;
  }
}

// Copies keys [row0, row0 + ROWS) of a cache in pages to shared memory; whatever lies past `row_end` or past `dim` becomes zero.
template <typename Tile, int ROWS>
__device__ __forceinline__ void load_tile(u32 smem, const PagedSource& src, int row0, int row_end) {
  constexpr int CHUNKS = Tile::CHUNKS;
  const int rows = row_end - row0;
  const int thread = opaque(threadIdx.x);
  if (src.aligned) {
#pragma unroll 2
    for (int index = thread; index < ROWS * CHUNKS; index += THREADS) {
      const int row = index / CHUNKS;
      const int chunk = index % CHUNKS;
      const int valid = row < rows ? min(max(src.dim - chunk * CHUNK, 0), CHUNK) : 0;
      cp_async_16<true>(smem + Tile::offset(row, chunk), valid > 0 ? src.row(row0 + row) + chunk * CHUNK : src.base,
                        valid * int(sizeof(Scalar)));
    }
    return;
  }
#pragma unroll 1
  for (int index = thread; index < ROWS * CHUNKS * 4; index += THREADS) {
    const int row = index / (CHUNKS * 4);
    const int column = index % (CHUNKS * 4) * (CHUNK / 4);
    const u32 word = row < rows && column < src.dim ? word_of_row(src.row(row0 + row), column, src.dim) : 0;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + Tile::offset(row, column / CHUNK) + column % CHUNK * int(sizeof(Scalar))), "r"(word)
                 : "memory");
  }
}

}  // namespace
