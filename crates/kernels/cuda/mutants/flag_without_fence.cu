// flag_without_fence - a producer and a consumer warp agree by flags, and on nothing else.
//
// The producer writes a tile, then raises `filled`; the consumer spins until it sees the
// flag, then reads the tile. `volatile` makes the compiler keep the accesses to the flags,
// but says nothing about the order in which another warp sees the tile and the flag: that
// needs a fence on both sides. A GPU of today mostly delivers them in order.
//
// MISTAKE = 0 hands the tiles over by named barriers, which order what comes before them on
// one side with what comes after them on the other. (Fences on both sides would do as well, and
// so would a consumer that arrives without waiting; compute-sanitizer's racecheck reports both.)
#include "owned_row.cuh"

constexpr int ROWS = 8;
constexpr int STAGES = 2;
constexpr int THREADS = 2 * LANES;
enum Barrier { FILLED = 1, DRAINED = FILLED + STAGES };  // one of each per stage

// Lane 0 announces that the whole warp is done with tile number `turn`.
__device__ __forceinline__ void raise(volatile int* flag, Barrier barrier, int turn, int lane) {
#if MISTAKE
  __syncwarp();
  if (lane == 0) *flag = turn + 1;
#else
  if (barrier == FILLED)  // the producer goes on to the next stage
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier + turn % STAGES), "n"(THREADS) : "memory");
  else
    asm volatile("bar.sync %0, %1;" ::"r"(barrier + turn % STAGES), "n"(THREADS) : "memory");
#endif
}

// Waits until the other warp is done with tile number `turn`.
__device__ __forceinline__ void wait_until(volatile int* flag, Barrier barrier, int turn) {
#if MISTAKE
  while (*flag < turn + 1) {
  }
#else
  asm volatile("bar.sync %0, %1;" ::"r"(barrier + turn % STAGES), "n"(THREADS) : "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    flag_without_fence(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[STAGES][TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[STAGES][TILE_ELEMENTS];
  __shared__ int filled;   // tiles that the producer has finished
  __shared__ int drained;  // tiles that the consumer has finished
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int first_row = blockIdx.x * ROWS;
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);
  if (threadIdx.x == 0) filled = drained = 0;
  __syncthreads();

  if (threadIdx.x < LANES) {
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int turn = tile - tiles.begin;
      if (turn >= STAGES) wait_until(&drained, DRAINED, turn - STAGES);
      copy_kv<LANES>(p, head, tile, k_tile[turn % STAGES], v_tile[turn % STAGES], lane);
      cp_async_commit();
      cp_async_wait<0>();
      raise(&filled, FILLED, turn, lane);
    }
  } else {
    OwnedRow rows[ROWS];
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int turn = tile - tiles.begin;
      wait_until(&filled, FILLED, turn);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (first_row + r < p.seq_q)
          rows[r].attend(p, head, first_row + r, tile, k_tile[turn % STAGES],
                         v_tile[turn % STAGES], lane);
      // The last tiles are waited for by nobody, and every arrival must be met.
      if (tile + STAGES < tiles.end) raise(&drained, DRAINED, turn, lane);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first_row + r < p.seq_q) rows[r].store(p, head, first_row + r, lane);
  }
}
