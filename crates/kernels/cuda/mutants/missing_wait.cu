// missing_wait - a tile is read while its asynchronous copy may still be under way.
//
// Two stages, filled one tile ahead. Copies are issued and their groups committed, and a
// barrier stands between the fill and the reading; but a barrier only orders what threads
// have done, and a cp.async is done by nobody until its thread waits for the group.
//
// MISTAKE = 0 waits for this tile's group before the barrier.
#include "owned_row.cuh"

constexpr int WARPS = 4;
constexpr int ROWS_PER_WARP = 4;
constexpr int ROWS = WARPS * ROWS_PER_WARP;
constexpr int THREADS = WARPS * LANES;
constexpr int STAGES = 2;

extern "C" __global__ void __launch_bounds__(THREADS)
    missing_wait(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[STAGES][TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[STAGES][TILE_ELEMENTS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int own_row = blockIdx.x * ROWS + threadIdx.x / LANES * ROWS_PER_WARP;
  const KeyRange tiles = tiles_of_rows(p, blockIdx.x * ROWS, ROWS);

  const auto issue = [&](int tile) {
    const int stage = (tile - tiles.begin) % STAGES;
    if (tile < tiles.end)
      copy_kv<THREADS>(p, head, tile, k_tile[stage], v_tile[stage], threadIdx.x);
    cp_async_commit();
  };

  OwnedRow rows[ROWS_PER_WARP];
  issue(tiles.begin);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    const int stage = (tile - tiles.begin) % STAGES;
    issue(tile + 1);
#if !MISTAKE
    cp_async_wait<1>();  // all but the newest group: this tile has arrived
#endif
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r)
      if (own_row + r < p.seq_q)
        rows[r].attend(p, head, own_row + r, tile, k_tile[stage], v_tile[stage], lane);
    __syncthreads();
  }
  cp_async_wait<0>();
#pragma unroll
  for (int r = 0; r < ROWS_PER_WARP; ++r)
    if (own_row + r < p.seq_q) rows[r].store(p, head, own_row + r, lane);
}
