// hopper_wide: fused attention for sm_90a and heads of more than 256 columns, whose O fills the registers of two warpgroups.
//
// A CTA has 64 query rows and four warpgroups (wide_layout.cuh): loaders, which stream K and V through rings of panels by TMA
// (wide_loader.cuh), one that computes the scores and their softmax once (wide_scores.cuh), and two that multiply them with half of the
// values' columns each (wide_output.cuh). So QKᵀ of one tile, the softmax of another and PV of a third run at the same time.
#include "wide_loader.cuh"
#include "wide_output.cuh"
#include "wide_scores.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_wide(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Layout layout{shared_address(smem)};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    layout.init_barriers();
    grid_launch_dependents();
  }
  __syncthreads();

  const QTile tile(p);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    registers_release<LOADER_REGS>();
    grid_wait();  // the inputs may be another kernel's outputs
    if (warp == 0 && elect_lane()) load_keys(layout, q_map, k_map, tile);
    if (warp == 1 && elect_lane()) load_values(layout, v_map, tile);
  } else if (warp < 8) {
    registers_claim<SCORE_REGS>();
    Scores{p, layout, tile}.run();
  } else {
    registers_claim<OUTPUT_REGS>();
    Output{p, layout, tile, warp / 4 - 2}.run();
  }
}
