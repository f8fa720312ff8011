// fragment_in_array - a WMMA fragment is stored to an array of the thread's own.
//
// The counterpart of fragment_in_local_memory, and what one writes first: the scores of a tile
// are stored into an array in the belief that each lane finds its own there. A fragment is
// spread over the lanes in an unspecified way, and a store is one operation of all of them on
// one matrix in shared or global memory. Here the compiler sees the array: it warns and
// leaves the computation out.
//
// MISTAKE = 0 keeps the scores in shared memory.
#include "wmma_scores.cuh"

extern "C" __global__ void __launch_bounds__(LANES)
    fragment_in_array(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(32) element q_tile[ROWS * PITCH];
  __shared__ __align__(32) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(32) element v_tile[TILE_ELEMENTS];
#if MISTAKE
  __align__(32) float scores[FRAG * SCORE_PITCH];
#else
  __shared__ __align__(32) float scores[FRAG * SCORE_PITCH];
#endif
  const Head head(p);
  const int lane = threadIdx.x;
  const int first_row = blockIdx.x * ROWS;
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);
  fill_q(p, head, first_row, q_tile, lane, LANES);

  OwnedRow rows[ROWS];
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    copy_kv<LANES>(p, head, tile, k_tile, v_tile, lane);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    score_tile(q_tile, k_tile, scores);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      rows[r].absorb(p, first_row + r, tile, scores[r * SCORE_PITCH + lane], v_tile, lane);
    __syncwarp();
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (first_row + r < p.seq_q) rows[r].store(p, head, first_row + r, lane);
}
