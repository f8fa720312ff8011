// ampere_fwd: fused attention for sm_80 and later, with mma.sync, ldmatrix and multi-stage cp.async.
//
// One CTA owns BLOCK_M query rows of one head, of wide heads with half of the values' columns (tiles.cuh), and walks the visible keys in
// tiles of BLOCK_N, left to right (mainloop.cuh). WARPS_M warps share the rows (16 or 32 each); WARPS_N warps share the keys of each tile, each keeping its own running (m, l, O), merged once at the
// end (epilogue.cuh). K and V arrive through a ring of STAGES tiles each (layout.cuh, loader.cuh, cache.cuh): loads are numbered K0 V0 K1 V1 ...,
// one commit group each, and the slot that step h-1 used is refilled at the start of step h.
#include "score.cuh"

using Scalar = element;
using ScoreHook = ScoreModifiers<SOFTCAP, ALIBI, BIAS, BOOLEAN_MASK, SINKS>;

#include "gemm.cuh"

#include "store_half.cuh"

#include "run.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) ampere_fwd(const __grid_constant__ SdpaParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  run_tiles(p, smem);
}
