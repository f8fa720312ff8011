// Bringing tiles from global to shared memory: 16-byte asynchronous copies where the
// addresses allow them, plain loads where they do not. Whatever lies outside the
// tensor is written as zero and never read.
#pragma once

#include "dtype.cuh"
#include "params.h"

// The first element of one head of a [batch, head, sequence, dim] tensor.
template <typename T>
__device__ __forceinline__ T* head_of(T* tensor, const long long (&stride)[3], int batch, int head) {
  return tensor + batch * stride[0] + head * stride[1];
}

// Grouped-query attention: consecutive query heads share one key/value head.
__device__ __forceinline__ int kv_head_of(const SdpaParams& p, int q_head) {
  return q_head / (p.heads_q / p.heads_kv);
}

// 16 bytes move between 16-byte aligned addresses, so the first row and the step from row
// to row must both be aligned. All threads of a CTA get the same answer.
template <typename T>
__device__ __forceinline__ bool rows_are_16_byte_aligned(const T* first_row, long long row_stride) {
  const u64 step = static_cast<u64>(row_stride) * sizeof(T);
  return ((reinterpret_cast<u64>(first_row) | step) & 15) == 0;
}

// The same value, of which the compiler knows nothing: what is computed from it is computed where it is needed, instead
// of once before the loop and then kept in registers that are not there.
__device__ __forceinline__ u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies `valid_bytes` (0..16) and fills the rest of the 16 bytes with zeros. `.cg`
// keeps the data out of L1: a tile is read from global memory once. PREFETCH_L2: the line
// of 128 bytes around it comes into L2 too.
template <bool PREFETCH_L2 = false>
__device__ __forceinline__ void cp_async_16(u32 shared_destination, const void* source, int valid_bytes) {
  if (PREFETCH_L2)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_destination), "l"(source),
                 "r"(valid_bytes)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_destination), "l"(source),
                 "r"(valid_bytes)
                 : "memory");
}

// All 16 bytes: a size that is not known costs instructions.
__device__ __forceinline__ void cp_async_16_whole(u32 shared_destination, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_destination), "l"(source) : "memory");
}

// 16 bytes of zeros.
__device__ __forceinline__ void store_zeros_16(u32 shared_destination) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared_destination), "r"(0) : "memory");
}

// Closes a group: all copies this thread issued since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's groups are still in flight. It says
// nothing about other threads' copies: a barrier must follow before they are read.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A ROWS x COLS tile of 16-bit elements in shared memory, rows PITCH elements apart.
template <int ROWS_, int COLS_, int PITCH_>
struct TileShape {
  static constexpr int ROWS = ROWS_;
  static constexpr int COLS = COLS_;
  static constexpr int PITCH = PITCH_;
  static constexpr int CHUNKS_PER_ROW = COLS / ELEMENTS_PER_CHUNK;
  static constexpr int CHUNKS = ROWS * CHUNKS_PER_ROW;
  static_assert(COLS % ELEMENTS_PER_CHUNK == 0, "a row is a whole number of 16-byte chunks");
  static_assert(PITCH % ELEMENTS_PER_CHUNK == 0, "every row starts 16-byte aligned");
  // Where element (row, col) lies. A tile type may permute the chunks of a row by
  // providing its own offset(); the copies below only ever ask this function.
  static __device__ __forceinline__ int offset(int row, int col) { return row * PITCH + col; }
};

// How many elements of the chunk at (row, col) exist in the tensor.
__device__ __forceinline__ int valid_elements(int row, int col, int valid_rows, int dim) {
  return row < valid_rows ? min(max(dim - col, 0), ELEMENTS_PER_CHUNK) : 0;
}

// One chunk by whoever calls, asynchronously or at once. `source` is the chunk's first
// element, `valid` how many of its elements exist; with none, nothing is read.
__device__ __forceinline__ void copy_chunk(bool aligned, element* chunk, const element* source,
                                           int valid) {
  if (aligned) {
    cp_async_16(shared_address(chunk), source, valid * static_cast<int>(sizeof(element)));
  } else {
#pragma unroll 1
    for (int i = 0; i < ELEMENTS_PER_CHUNK; ++i)
      chunk[i] = i < valid ? source[i] : from_float<element>(0.0f);
  }
}

// Issues the copies of one tile; the caller commits. `source` is the tile's first row.
template <typename Tile, int THREADS>
__device__ __forceinline__ void copy_tile_async(element* tile, const element* source,
                                                long long row_stride, int valid_rows, int dim,
                                                int thread) {
#pragma unroll 2
  for (int chunk = thread; chunk < Tile::CHUNKS; chunk += THREADS) {
    const int row = chunk / Tile::CHUNKS_PER_ROW;
    const int col = chunk % Tile::CHUNKS_PER_ROW * ELEMENTS_PER_CHUNK;
    const int valid = valid_elements(row, col, valid_rows, dim);
    // A chunk with nothing valid still needs a legal address to not read from.
    const element* from = valid > 0 ? source + row * row_stride + col : source;
    cp_async_16(shared_address(tile + Tile::offset(row, col)), from,
                valid * static_cast<int>(sizeof(element)));
  }
}

// The same tile with element-sized loads and ordinary stores: complete on return.
template <typename Tile, int THREADS>
__device__ __forceinline__ void copy_tile_plain(element* tile, const element* source,
                                                long long row_stride, int valid_rows, int dim,
                                                int thread) {
#pragma unroll 1
  for (int i = thread; i < Tile::ROWS * Tile::COLS; i += THREADS) {
    const int row = i / Tile::COLS;
    const int col = i % Tile::COLS;
    const bool exists = row < valid_rows && col < dim;
    tile[Tile::offset(row, col)] =
        exists ? source[row * row_stride + col] : from_float<element>(0.0f);
  }
}

// Chooses between the two; `aligned` is the same for all threads.
template <typename Tile, int THREADS>
__device__ __forceinline__ void copy_tile(bool aligned, element* tile, const element* source,
                                          long long row_stride, int valid_rows, int dim,
                                          int thread) {
  if (aligned)
    copy_tile_async<Tile, THREADS>(tile, source, row_stride, valid_rows, dim, thread);
  else
    copy_tile_plain<Tile, THREADS>(tile, source, row_stride, valid_rows, dim, thread);
}
