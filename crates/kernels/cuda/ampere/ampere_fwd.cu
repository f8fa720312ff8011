// ampere_fwd: fused attention for sm_80 and later, with mma.sync, ldmatrix and multi-stage cp.async.
//
// One CTA owns BLOCK_M query rows of one head (tiles.cuh) and walks the visible keys in tiles of BLOCK_N, left to right (mainloop.cuh). WARPS_M warps
// share the rows (16 or 32 each); WARPS_N warps share the keys of each tile, each keeping its own running (m, l, O), merged once at the
// end (epilogue.cuh). K and V arrive through a ring of STAGES tiles each (layout.cuh, loader.cuh, cache.cuh): loads are numbered K0 V0 K1 V1 ...,
// one commit group each, and the slot that step h-1 used is refilled at the start of step h.
#include "score.cuh"

using ScoreHook = ScoreModifiers<SOFTCAP, ALIBI, BIAS, BOOLEAN_MASK, SINKS>;

#include "epilogue.cuh"
#include "unowned.cuh"

__device__ __forceinline__ void run_tile(const SdpaParams& p, unsigned char* smem, const Work& work) {
  float o[M_TILES][O_TILES][4] = {};
  RowPair state[M_TILES];
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) row_pair_reset(state[mt]);

  attend(p, shared_address(smem), work, o, state);
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) reduce_row_sums(state[mt]);
  if (WARPS_N == 1)
    store_rows(p, smem, work, o, state);
  else
    merge_rows(p, smem, work, o, state);
}

// Rows that no sequence owns.
__device__ __forceinline__ void clear_rest(const SdpaParams& p) {
  constexpr u32 WARPS = THREADS / 32;
  clear_unowned_rows(p, blockIdx.x * WARPS + threadIdx.x / 32, gridDim.x * WARPS);
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) ampere_fwd(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  if constexpr (PACKED_QUERIES) {
    TileQueue queue;
    TilePlace place;
    for (;;) {
      int tiles;
      const int number = queue.take(p, reinterpret_cast<int*>(smem));
      if (!find_tile<BLOCK_M>(p, p.heads_q, number, place, tiles)) {
        queue.finish(p, number, tiles);
        return clear_rest(p);
      }
      run_tile(p, smem, Work(p, place));
      if (!p.counter) __syncthreads();
    }
  } else {
    run_tile(p, smem, Work(p, place_of_cta(p)));
    if (USED_QUERIES) clear_rest(p);
  }
}
