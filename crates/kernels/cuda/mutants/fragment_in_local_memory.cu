// fragment_in_local_memory - a WMMA fragment is loaded from an array of the thread's own.
//
// wmma::load_matrix_sync is one operation of 32 lanes on one matrix in shared or global
// memory; which lane reads which element is unspecified. Here each lane passes the address
// of its own local array, believing it to be registers. There is no such matrix: the
// result is undefined, and a memory checker counts an error for every lane and load.
//
// Where the compiler sees the array and the load together it warns ("cannot perform wmma
// load or store on local memory") and compiles a trap. It cannot when it does not see where
// a pointer comes from, as between separately compiled files.
//
// MISTAKE = 0 keeps the Q tile in shared memory.
#include "wmma_scores.cuh"

// The same pointer, with its origin out of the compiler's sight.
__device__ __forceinline__ const element* of_unknown_origin(const element* pointer) {
  asm volatile("" : "+l"(pointer)::"memory");
  return pointer;
}

extern "C" __global__ void __launch_bounds__(LANES)
    fragment_in_local_memory(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(32) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(32) element v_tile[TILE_ELEMENTS];
  __shared__ __align__(32) float scores[FRAG * SCORE_PITCH];
#if MISTAKE
  __align__(32) element q_tile[ROWS * PITCH];
  const int first = 0, step = 1;  // every lane fills the array it takes for its own
#else
  __shared__ __align__(32) element q_tile[ROWS * PITCH];
  const int first = threadIdx.x, step = LANES;
#endif
  const Head head(p);
  const int lane = threadIdx.x;
  const int first_row = blockIdx.x * ROWS;
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);

  fill_q(p, head, first_row, q_tile, first, step);
  OwnedRow rows[ROWS];
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    copy_kv<LANES>(p, head, tile, k_tile, v_tile, lane);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    score_tile(of_unknown_origin(q_tile), k_tile, scores);
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
