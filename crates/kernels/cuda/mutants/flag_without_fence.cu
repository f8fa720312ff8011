// flag_without_fence - a producer and a consumer warp agree by flags, and on nothing else.
//
// The producer writes a tile, then raises `filled`; the consumer spins until it sees the
// flag, then reads the tile. `volatile` makes the compiler keep the accesses to the flags,
// but says nothing about the order in which another warp sees the tile and the flag: that
// needs a fence on both sides. A GPU of today mostly delivers them in order.
//
// MISTAKE = 0 hands the tiles over by barriers of the block, which order what comes before them
// with what comes after them. (Fences on both sides of the flags, or barriers between the two
// warps alone, would do as well; compute-sanitizer's racecheck and synccheck report them.)
#include "owned_row.cuh"

constexpr int ROWS = 8;
constexpr int STAGES = 2;
constexpr int THREADS = 2 * LANES;

// Lane 0 announces that the whole warp is done with tile number `turn`.
__device__ __forceinline__ void raise(volatile int* flag, int turn, int lane) {
  __syncwarp();
  if (lane == 0) *flag = turn + 1;
}

// Waits until the other warp is done with tile number `turn`.
__device__ __forceinline__ void wait_until(volatile int* flag, int turn) {
  while (*flag < turn + 1) {
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    flag_without_fence(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[STAGES][TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[STAGES][TILE_ELEMENTS];
  __shared__ int filled;   // tiles that the producer has finished
  __shared__ int drained;  // tiles that the consumer has finished
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const bool producer = threadIdx.x < LANES;
  const int first_row = blockIdx.x * ROWS;
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);
  if (threadIdx.x == 0) filled = drained = 0;
  __syncthreads();

  OwnedRow rows[ROWS];
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int turn = tile - tiles.begin;
    if (producer) {
      if (MISTAKE && turn >= STAGES) wait_until(&drained, turn - STAGES);
      copy_kv<LANES>(p, head, tile, k_tile[turn % STAGES], v_tile[turn % STAGES], lane);
      cp_async_commit();
      cp_async_wait<0>();
      if (MISTAKE) raise(&filled, turn, lane);
    } else if (MISTAKE) {
      wait_until(&filled, turn);
    }
    if (!MISTAKE) __syncthreads();
    if (!producer) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (first_row + r < p.seq_q)
          rows[r].attend(p, head, first_row + r, tile, k_tile[turn % STAGES],
                         v_tile[turn % STAGES], lane);
      if (MISTAKE) raise(&drained, turn, lane);
    }
    if (!MISTAKE) __syncthreads();
  }
  if (!producer) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first_row + r < p.seq_q) rows[r].store(p, head, first_row + r, lane);
  }
}
