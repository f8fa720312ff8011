// flag_without_fence - a producer and a consumer warp agree by flags, and on nothing else.
//
// The producer writes a tile, then raises `filled`; the consumer spins until it sees the
// flag, then reads the tile. `volatile` makes the compiler keep the accesses to the flags,
// but says nothing about the order in which another warp sees the tile and the flag: that
// needs a fence on both sides. A GPU of today mostly delivers them in order.
//
// MISTAKE = 0 adds the fences. (A named barrier, as in sdpa_fp8_stage_c, is better still.)
#include "owned_row.cuh"

constexpr int ROWS = 8;
constexpr int STAGES = 2;

__device__ __forceinline__ void order_with_flags() {
#if !MISTAKE
  __threadfence_block();
#endif
}

// Lane 0 announces what the whole warp has done.
__device__ __forceinline__ void raise(volatile int* flag, int value, int lane) {
  __syncwarp();
  if (lane == 0) {
    order_with_flags();
    *flag = value;
  }
}

__device__ __forceinline__ void wait_until(volatile int* flag, int value) {
  while (*flag < value) {
  }
  order_with_flags();
}

extern "C" __global__ void __launch_bounds__(2 * LANES)
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
      wait_until(&drained, turn + 1 - STAGES);
      copy_kv<LANES>(p, head, tile, k_tile[turn % STAGES], v_tile[turn % STAGES], lane);
      cp_async_commit();
      cp_async_wait<0>();
      raise(&filled, turn + 1, lane);
    }
  } else {
    OwnedRow rows[ROWS];
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int turn = tile - tiles.begin;
      wait_until(&filled, turn + 1);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (first_row + r < p.seq_q)
          rows[r].attend(p, head, first_row + r, tile, k_tile[turn % STAGES],
                         v_tile[turn % STAGES], lane);
      raise(&drained, turn + 1, lane);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (first_row + r < p.seq_q) rows[r].store(p, head, first_row + r, lane);
  }
}
