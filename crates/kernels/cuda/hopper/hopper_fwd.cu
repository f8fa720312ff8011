// hopper_fwd: fused attention for sm_90a on TMA, mbarriers and wgmma.
//
// A CTA is a tile scheduler and a producer, one thread each (a warp or two where lengths or pages are data), and CONSUMERS warpgroups of 64 query rows. The scheduler publishes one Q tile
// after the other (scheduler.cuh), the producer streams its Q, K and V through rings in shared memory (layout.cuh, producer.cuh), and the
// consumers compute it (mainloop.cuh) and store it (epilogue.cuh). The warps that are left clear rows that no sequence owns (unowned.cuh). K and V have rings of STAGES tiles with a full barrier, filled by TMA,
// and an empty barrier, one arrival per consumer warp, per slot.
//
//   rows: 64·CONSUMERS, made of PACK_HEADS query heads (of one key head) × POSITIONS positions
#include "score.cuh"

using ScoreHook = ScoreModifiers<SOFTCAP, ALIBI, BIAS, BOOLEAN_MASK, SINKS>;

#include "mainloop.cuh"
#include "producer.cuh"
#include "sloped.cuh"
#include "unowned.cuh"
#include "watched.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    hopper_fwd(const __grid_constant__ SdpaParams p, const __grid_constant__ TensorMap q_map,
               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
               const __grid_constant__ TensorMap o_map) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Layout layout(shared_address(smem));
  if (threadIdx.x == 0) {
    tma_prefetch_map(&q_map);
    tma_prefetch_map(&k_map);
    tma_prefetch_map(&v_map);
    layout.init_barriers();
    grid_launch_dependents();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_release<PRODUCER_REGS>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 1 && (PACKED_QUERIES || elect_lane()))
      run_scheduler<SchedulerOf<(PACKED_QUERIES > 0)>::type>(p, layout);
    else if ((warp == 0 || FEEDERS > 1 && warp == 2) && (PRODUCER_IS_WARP || elect_lane()))
      Producer(p, q_map, k_map, v_map, layout, warp / 2).run();
    else if (OWN_QUERIES && warp > FEEDERS) {
      constexpr int CLEARERS = 3 - FEEDERS;
      grid_wait();  // lengths may be another kernel's outputs
      clear_unowned_rows(p, CLEARERS * blockIdx.x + warp - 1 - FEEDERS, CLEARERS * gridDim.x);
    }
  } else {
    registers_claim<CONSUMER_REGS>();
    Consumer consumer(p, layout);
    for (;;) {
      const RingPosition<WORK_SLOTS> work_at = {consumer.q_at.uses};
      mbarrier_wait(layout.work_full(work_at.slot()), work_at.parity());
      const WarpWork work(layout.work_slot(work_at.slot()));
      if (!work.more()) break;
      consumer.attend(work.tile(p, layout.work_slot(work_at.slot())));
      const bool overflowed = consumer.overflowed();
      store_tile(p, o_map, layout, consumer.q_at, consumer.warpgroup, consumer.o, consumer.state, overflowed);
      consumer.q_at.advance();
    }
    if (STORE_LATER && elect_lane()) tma_store_wait_read();
  }
}
