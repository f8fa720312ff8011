// missing_barrier - nobody waits for the readers of a tile before it is overwritten.
//
// Four warps own four rows each and fill one K and one V tile together. The barrier after
// the fill is there, so every tile is complete when it is read. The barrier after the
// reading is not: a fast warp fills the next tile while a slow one still reads this one.
// On a GPU the warps of a small CTA often stay close enough together for the result to be
// right, which is why this mistake survives testing.
//
// MISTAKE = 0 puts the barrier back.
#include "owned_row.cuh"

constexpr int WARPS = 4;
constexpr int ROWS_PER_WARP = 4;
constexpr int ROWS = WARPS * ROWS_PER_WARP;
constexpr int THREADS = WARPS * LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
    missing_barrier(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[TILE_ELEMENTS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int own_row = blockIdx.x * ROWS + threadIdx.x / LANES * ROWS_PER_WARP;
  const KeyRange tiles = tiles_of_rows(p, blockIdx.x * ROWS, ROWS);

  OwnedRow rows[ROWS_PER_WARP];
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    copy_kv<THREADS>(p, head, tile, k_tile, v_tile, threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // the tile is complete for everybody
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r)
      if (own_row + r < p.seq_q) rows[r].attend(p, head, own_row + r, tile, k_tile, v_tile, lane);
#if !MISTAKE
    __syncthreads();  // everybody has read it: it may be overwritten
#endif
  }
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r)
    if (own_row + r < p.seq_q) rows[r].store(p, head, own_row + r, lane);
}
