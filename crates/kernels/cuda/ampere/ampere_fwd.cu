// ampere_fwd: fused attention for sm_80 and later, with mma.sync, ldmatrix and multi-stage cp.async.
//
// One CTA owns BLOCK_M query rows of one head and walks the visible keys in tiles of BLOCK_N, left to right (mainloop.cuh). WARPS_M warps
// share the rows (16 or 32 each); WARPS_N warps share the keys of each tile, each keeping its own running (m, l, O), merged once at the
// end (epilogue.cuh). K and V arrive through a ring of STAGES tiles each (layout.cuh, loader.cuh): loads are numbered K0 V0 K1 V1 ...,
// one commit group each, and the slot that step h-1 used is refilled at the start of step h.
#include "score.cuh"

using ScoreHook = PlainScores;

#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) ampere_fwd(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  const Work work(p);
  float o[M_TILES][O_TILES][4] = {};
  float row_max[M_TILES][2], row_sum[M_TILES][2];
  RowPair nothing_seen;
  ScoreHook::begin(p, work.head, nothing_seen);
#pragma unroll
  for (int mt = 0; mt < M_TILES; ++mt)
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[mt][r] = nothing_seen.max[r], row_sum[mt][r] = nothing_seen.sum[r];

  attend(p, shared_address(smem), work, o, row_max, row_sum);
  reduce_sums(row_sum);
  if (WARPS_N == 1)
    store_rows(p, smem, work, o, row_max, row_sum);
  else
    merge_rows(p, smem, work, o, row_max, row_sum);
}
