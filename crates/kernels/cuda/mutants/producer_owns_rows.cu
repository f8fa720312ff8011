// producer_owns_rows - the rows are divided among all eight warps, but one only fetches.
//
// Warp 7 prefetches K and V and never computes. The division of the rows forgets this and
// gives it its share too: nobody accumulates these rows and nobody writes them, so they
// keep what the output held before - NaN, where the buffer was poisoned. Everything is
// ordered, nothing races: only the result is wrong, in one row of eight.
//
// MISTAKE = 0 divides the rows among the seven warps that compute.
#include "owned_row.cuh"

constexpr int WARPS = 8;
constexpr int PRODUCER_WARP = 7;
constexpr int OWNERS = MISTAKE ? WARPS : PRODUCER_WARP;
constexpr int ROWS = 32;
constexpr int MAX_OWNED = (ROWS + OWNERS - 1) / OWNERS;
constexpr int THREADS = WARPS * LANES;

extern "C" __global__ void __launch_bounds__(THREADS)
    producer_owns_rows(const __grid_constant__ SdpaParams p) {
  __shared__ __align__(16) element k_tile[TILE_ELEMENTS];
  __shared__ __align__(16) element v_tile[TILE_ELEMENTS];
  const Head head(p);
  const int lane = threadIdx.x % LANES;
  const int warp = threadIdx.x / LANES;
  const bool computes = warp != PRODUCER_WARP;
  const int first_row = blockIdx.x * ROWS;
  const int begin = first_row + warp * ROWS / OWNERS;
  const int end = min(first_row + (warp + 1) * ROWS / OWNERS, p.seq_q);
  const KeyRange tiles = tiles_of_rows(p, first_row, ROWS);

  OwnedRow rows[MAX_OWNED];
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    if (!computes) {
      copy_kv<LANES>(p, head, tile, k_tile, v_tile, lane);
      cp_async_commit();
      cp_async_wait<0>();
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < MAX_OWNED; ++r)
      if (computes && begin + r < end)
        rows[r].attend(p, head, begin + r, tile, k_tile, v_tile, lane);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < MAX_OWNED; ++r)
    if (computes && begin + r < end) rows[r].store(p, head, begin + r, lane);
}
