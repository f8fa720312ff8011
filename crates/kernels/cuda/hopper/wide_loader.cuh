// What brings Q, K and V of hopper_wide to shared memory: a thread for queries and keys, and one for values.
//
// Waiting on an empty barrier with the opposite parity succeeds at once in the first round. In a cluster the CTAs take turns to fetch
// for all; each announces to its own barrier what will arrive, whoever sends it.
#pragma once
#include "launch.cuh"
#include "wide_layout.cuh"

namespace {

__device__ __forceinline__ void await_empty(u32 full, u32 parity) {
  if (CLUSTER > 1)
    mbarrier_wait_cluster(Layout::empty(full), parity ^ 1);
  else
    mbarrier_wait(Layout::empty(full), parity ^ 1);
}

__device__ __forceinline__ void fetch(u32 smem, const TensorMap& map, u32 barrier, int column, int row, const QTile& t) {
  if (CLUSTER > 1)
    tma_load_multicast(smem, &map, barrier, column, row, t.head_kv, t.batch, (1 << CLUSTER) - 1, L2_EVICT_LAST);
  else
    tma_load(smem, &map, barrier, column, row, t.head_kv, t.batch, L2_EVICT_LAST);
}

__device__ __forceinline__ void load_keys(const Layout& layout, const TensorMap& q_map, const TensorMap& k_map, const QTile& t) {
  mbarrier_expect_bytes(layout.q_full(), Q_BYTES);
  for (int panel = 0; panel < QK_PANELS; ++panel)
    tma_load(layout.smem + panel * Q_PANEL_BYTES, &q_map, layout.q_full(), panel * PANEL, t.m0, t.head, t.batch, L2_EVICT_FIRST);
  Ring<K_SLOTS> at;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  u32 turn = 0;
  for (int n = t.tiles.end - 1; n >= t.tiles.begin; --n)
    for (int panel = 0; panel < QK_PANELS; ++panel, ++turn, at.advance()) {
      const u32 full = layout.k_full(at.slot);
      await_empty(full, at.parity);
      mbarrier_expect_bytes(full, K_SLOT_BYTES);
      if (turn % CLUSTER == rank) fetch(layout.k(at.slot), k_map, full, panel * PANEL, n * BLOCK_N, t);
    }
}

__device__ __forceinline__ void load_values(const Layout& layout, const TensorMap& v_map, const QTile& t) {
  Ring<V_SLOTS> at;
  const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
  for (int n = t.tiles.end - 1; n >= t.tiles.begin; --n)
    for (int key = 0; key < BLOCK_N; key += VALUE_KEYS, at.advance())
      for (int half = 0; half < 2; ++half) {
        const u32 full = layout.v_full(half, at.slot);
        await_empty(full, at.parity);
        mbarrier_expect_bytes(full, V_SLOT_BYTES);
        if (half % CLUSTER != rank) continue;
#pragma unroll
        for (int panel = 0; panel < V_PANELS; ++panel)
          fetch(layout.v(half, at.slot) + panel * V_PANEL_BYTES, v_map, full, half * COLUMNS + panel * PANEL, n * BLOCK_N + key, t);
      }
}

}  // namespace
