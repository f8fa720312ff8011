// hopper_small: attention for problems that do not fill the GPU (short sequences, decoding).
//
// The keys of one Q tile are split over the warpgroups of a CTA and the CTAs of a cluster (small_layout.cuh). Everything that fits is
// requested by TMA before anyone waits (small_loader.cuh). Every warpgroup works on its part of the keys (small_mainloop.cuh), the parts
// are merged in registers (small_merge.cuh) and stored (small_epilogue.cuh).
#include "score.cuh"

using ScoreHook = PlainScores;

#include "small_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_small(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 shared = shared_address(smem);
  if (threadIdx.x == 0) {  // TMA reads the maps before anything else
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    if (!LATE_TRIGGER) grid_launch_dependents();
  }
  const Share at(p, shared);
  const Loader loader{at, q_map, k_map, v_map};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp == 0 && elect_lane()) {
    loader.init_barriers();
    grid_wait();  // the inputs may be another kernel's outputs
    loader.load_first_stages();
  }
  __syncwarp();
  // While the loads travel.
  if (CLUSTER > 1) cluster_arrive_relaxed();  // answered before the first remote write: every CTA has started
  __syncthreads();

  Part part(at, loader);
  part.run(warp, [&] { send_statistics(at, part.state, part.lane, part.warp_row); });

  float mine[WG_COLUMNS / 2];
  merge_warpgroups(at, part.o, part.state, ScoreHook::scale_log2(p), mine);
  const Destination to(at, part.warp_row, part.rows);
  float slice[SLICE / 2];
  merge_cluster(at, mine, part.state, ScoreHook::scale_log2(p), part.warp_row, slice);
  store_slice(at, to, slice, part.state, part.rows, part.lane);
}
