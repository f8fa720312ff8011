// ampere_fwd, ampere_f32: the Q tiles of a CTA: one, or of packed sequences as many as it gets.
#pragma once
#include "epilogue.cuh"
#include "unowned.cuh"

namespace {

__device__ __forceinline__ void run_tile(const SdpaParams& p, unsigned char* smem, const Work& work) {
  float o[M_TILES][O_TILES][4] = {};
  RowPair state[M_TILES];
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) row_pair_reset(state[mt]);

  attend(p, shared_address(smem), work, o, state);
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt) reduce_row_sums(state[mt]);
  if constexpr (WARPS_N > 1)
    merge_rows(p, smem, work, o, state);
  else
    store_rows(p, smem, work, o, state);
}

// Rows that no sequence owns.
__device__ __forceinline__ void clear_rest(const SdpaParams& p) {
  constexpr u32 WARPS = THREADS / 32;
  clear_unowned_rows<Scalar>(p, blockIdx.x * WARPS + threadIdx.x / 32, gridDim.x * WARPS);
}

__device__ __forceinline__ void run_tiles(const SdpaParams& p, unsigned char* smem) {
  if constexpr (PACKED_QUERIES) {
    TileQueue queue;
    TilePlace place;
    for (;;) {
      int tiles;
      const int number = queue.take(p, reinterpret_cast<int*>(smem));
      if (!find_tile<BLOCK_M>(p, p.heads_q * VALUE_PARTS, number, place, tiles)) {
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

}  // namespace
