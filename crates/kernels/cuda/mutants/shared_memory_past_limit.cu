// shared_memory_past_limit - the whole sequence of K and V is kept in shared memory.
//
// One fill, one barrier, and right at short sequences. The size grows with the sequence:
// 36 KB at 128 keys of dimension 64, 144 KB at 512, 576 KB at 2048, past every GPU there
// is. Unchecked, the launch fails with "invalid argument", or is never made and leaves the
// previous output standing. The size is in the manifest, so it is known before.
//
// MISTAKE = 0 holds 32 keys at a time (RESIDENT_TILES = 1, from the manifest).
#include "owned_row.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * LANES;

extern __shared__ __align__(16) element resident[];

__device__ __forceinline__ element* k_tile(int slot) { return resident + 2 * slot * TILE_ELEMENTS; }
__device__ __forceinline__ element* v_tile(int slot) { return k_tile(slot) + TILE_ELEMENTS; }

extern "C" __global__ void __launch_bounds__(THREADS)
    shared_memory_past_limit(const __grid_constant__ SdpaParams p) {
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int own_row = blockIdx.x * WARPS + threadIdx.x / LANES;
  const KeyRange tiles = tiles_of_rows(p, blockIdx.x * WARPS, WARPS);

  OwnedRow row;
  for (int first = tiles.begin; first < tiles.end; first += RESIDENT_TILES) {
    const int last = min(first + RESIDENT_TILES, tiles.end);
    for (int tile = first; tile < last; ++tile)
      copy_kv<THREADS>(p, head, tile, k_tile(tile - first), v_tile(tile - first), threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (own_row < p.seq_q)
      for (int tile = first; tile < last; ++tile)
        row.attend(p, head, own_row, tile, k_tile(tile - first), v_tile(tile - first), lane);
    __syncthreads();
  }
  if (own_row < p.seq_q) row.store(p, head, own_row, lane);
}
