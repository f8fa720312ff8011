// nobody_begins - a producer and a consumer warp each wait for the other to begin.
//
// One K/V tile goes back and forth between them by two named barriers, as in
// sdpa_fp8_stage_c: EMPTY says that it may be filled, FULL that it may be read. Who announces
// arrives, who needs to know synchronises. At the start the tile is empty and nobody has
// said so: the producer waits for EMPTY, the consumer for FULL, for ever.
//
// MISTAKE = 0 lets the consumer announce the empty tile before its first wait.
#include "owned_row.cuh"

constexpr int ROWS = 8;
constexpr int THREADS = 2 * LANES;
enum Barrier { FULL = 1, EMPTY = 2 };

__device__ __forceinline__ void barrier_sync(Barrier barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(static_cast<int>(barrier)), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(static_cast<int>(barrier)), "n"(THREADS) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS)
    nobody_begins(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[TILE_ELEMENTS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int first_row = blockIdx.x * ROWS;
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);

  if (threadIdx.x < LANES) {
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      barrier_sync(EMPTY);
      copy_kv<LANES>(p, head, tile, k_tile, v_tile, lane);
      cp_async_commit();
      cp_async_wait<0>();
      barrier_arrive(FULL);
    }
  } else {
    OwnedRow rows[ROWS];
#if !MISTAKE
    if (tiles.begin < tiles.end) barrier_arrive(EMPTY);
#endif
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      barrier_sync(FULL);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (first_row + r < p.seq_q)
          rows[r].attend(p, head, first_row + r, tile, k_tile, v_tile, lane);
      if (tile + 1 < tiles.end) barrier_arrive(EMPTY);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first_row + r < p.seq_q) rows[r].store(p, head, first_row + r, lane);
  }
}
