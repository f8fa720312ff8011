// From the accumulators of a finished Q tile to O and the log-sum-exp.
#pragma once
#include "barrier.cuh"
#include "layout.cuh"
#include "lse.cuh"
#include "mma.cuh"
#include "recompute.cuh"
#include "score.cuh"
#include "store.cuh"

namespace {

// TMA's reading of a stored Q tile is waited for under the first QKᵀ of the next one, which has another slot.
constexpr bool STORE_LATER = !STORE_DIRECT && Q_STAGES > 1;

// TMA would store past a sequence's last query: the warp whose rows it is among stores them itself. What that depends on comes by shuffles:
// ptxas then knows that all lanes of a warp do the same, and keeps the loop's bounds and descriptors out of vector registers.
constexpr bool MIXED_STORES = OWN_QUERIES && !STORE_DIRECT;

// The first row of this thread's warp in the Q tile. Worked out where it is needed instead of kept in a register.
__device__ __forceinline__ int first_row_of_warp() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread / 32 * 16 - 64;
}

// Stages this warp's 16 rows where its Q rows were, which no warp reads any more, and lets TMA store them.
__device__ __forceinline__ void store_by_tma(const float (&o)[VALUE_DIM / 2], const TensorMap& o_map, const Layout& layout, int slot,
                                             int warp_row, int m0, int head, int batch) {
  const int lane = threadIdx.x % 32;
  const u32 o_smem = layout.q(slot);
  const int store_row = warp_row + (lane & 15);
#pragma unroll
  for (int j = 0; j < VALUE_DIM / 8; j += 2) {
    const int chunk = j % 8 + (lane >> 4);
    stmatrix_x4(o_smem + (j / 8) * Q_PANEL_BYTES + panel_offset(store_row, chunk), pack_pair(o[4 * j], o[4 * j + 1]),
                pack_pair(o[4 * j + 2], o[4 * j + 3]), pack_pair(o[4 * j + 4], o[4 * j + 5]),
                pack_pair(o[4 * j + 6], o[4 * j + 7]));
  }
  async_proxy_fence();
  __syncwarp();
  if (elect_lane()) {  // always the same one
#pragma unroll
    for (int panel = 0; panel < V_PANELS; ++panel)
      tma_store(&o_map, o_smem + panel * Q_PANEL_BYTES + warp_row * 128, panel * PANEL, m0, head, batch);
    tma_store_commit();
    if (!STORE_LATER) {
      tma_store_wait_read();
      mbarrier_arrive(layout.q_empty(slot));
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void store_tile(const SdpaParams& p, const TensorMap& o_map, const Layout& layout, RingPosition<Q_STAGES> q_at,
                                           int warpgroup, float (&o)[VALUE_DIM / 2], RowPair& state, bool overflowed) {
  const int lane = threadIdx.x % 32;
  // Read again, so that rows, head and batch are not kept in registers over the loop.
  const int slot = RingPosition<WORK_SLOTS>{q_at.uses}.slot();
  const int warp_row = MIXED_STORES ? __shfl_sync(~0u, first_row_of_warp(), 0) : first_row_of_warp();
  const WarpWork work(layout.work_slot(slot));
  int m0 = work.m0(), head = work.head();
  const int batch = work.batch();
  if (PACK_HEADS > 1) head += warp_row / POSITIONS;
  m0 += warp_row % POSITIONS;
  const int rows[2] = {m0 + lane / 4, m0 + lane / 4 + 8};
  const auto& bounds = bounds_of<OWN_QUERIES>(layout.work_slot(slot), p);
  const int seq_q = MIXED_STORES ? __shfl_sync(~0u, bounds.seq_q, 0) : bounds.seq_q;
  const int first = first_query(bounds);
  reduce_row_sums(state);
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) inverse[r] = ScoreHook::inverse(p, head, state.max[r], state.sum[r]);
  scale_rows(o, inverse);
  __syncwarp();  // all eight lanes have read their word
  if (lane == 0 && !overflowed) mbarrier_arrive(layout.work_empty(slot));
  if (!STORE_DIRECT) named_barrier_sync(EPILOGUE_BARRIER + warpgroup, 128);  // no warp still reads this warpgroup's Q
  if (STORE_DIRECT || MIXED_STORES && m0 + 16 > seq_q) {
    element* o_head = static_cast<element*>(p.o) + batch * p.o_stride[0] + head * p.o_stride[1];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      store_row<VALUE_DIM>(o, r, o_head + (first + rows[r]) * p.o_stride[2], rows[r] < seq_q, 0, p.dim_v);
    if (!STORE_DIRECT && !STORE_LATER && lane == 0) mbarrier_arrive(layout.q_empty(q_at.slot()));
  } else {
    store_by_tma(o, o_map, layout, q_at.slot(), warp_row, first + m0, head, PACKED_QUERIES ? 0 : batch);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (p.lse && lane % 4 == 0 && rows[r] < seq_q)
      LSE_OF(p, batch, head, first + rows[r]) = ScoreHook::lse(p, head, state.max[r], state.sum[r]);
  if (overflowed) {
    if (!STORE_DIRECT && elect_lane()) tma_store_wait();  // what is stored again must come second
    __syncwarp();
    recompute_rows(p, bounds_of<OWN_LENGTHS>(layout.work_slot(slot), p), batch, head, __shfl_sync(~0u, m0, 0));
    if (lane == 0) mbarrier_arrive(layout.work_empty(slot));
  }
}

}  // namespace
